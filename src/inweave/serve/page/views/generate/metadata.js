// The settings that are stored in an image: of a file, or of an image whose job has expired.
import {app, formatTag, parseTags, tagName, texts, toast} from "../../kit.js"
import {draft} from "./draft.js"

const t = texts.generate

/** The settings with the LoRAs of this library, as tags in the prompt. @param {ImageMetadata} metadata @returns {Fields} */
export function settingsOf({settings, loras}) {
	const library = app.get().loras
	let prompt = settings.prompt ?? ""
	for (const {reference, id, name} of loras) {
		const lora = library?.find(each => each.id === id)
		const here = lora ? tagName(lora, library) : name
		const tag = parseTags(prompt).find(each => each.name === reference)
		const choice = settings.loras?.find(each => (each.name ?? each.hash) === reference)
		if (tag) prompt = prompt.slice(0, tag.start) + formatTag(here, tag.te, tag.unet) + prompt.slice(tag.end)
		else if (choice)
			prompt =
				`${prompt} ${formatTag(here, choice.te ?? choice.strength ?? 1, choice.unet ?? choice.strength ?? 1)}`.trim()
	}
	return {...settings, prompt, loras: undefined, count: undefined}
}

/** Load them into the form, and report what is missing. @param {ImageMetadata} metadata */
export function takeMetadata(metadata) {
	draft.take(settingsOf(metadata))
	if (metadata.warnings.length) toast(t.restoredWarnings, {kind: "warning", details: metadata.warnings})
	else toast(t.restored)
}
