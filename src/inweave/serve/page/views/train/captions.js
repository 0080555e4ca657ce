// Bulk edits of captions: prepend, append, replace, remove a tag; the tags with their counts.
import {Button, html, Segmented, Select, showError, submits, Text, useState, useStore} from "../../kit.js"
import {Captioner} from "./captioner.js"
import {desk, saveCaptions, undoCaptions} from "./state.js"
import {t} from "./strings.js"

const MAX_TAGS = 40

/** @param {string} caption */
const tagsOf = caption =>
	caption
		.split(",")
		.map(tag => tag.trim())
		.filter(Boolean)

/**
 * A caption after an edit.
 * @param {string} mode @param {string} caption @param {string} text
 * @param {string} other replaces the text, or separates it from the caption
 */
export function edited(mode, caption, text, other) {
	const now = caption.trim()
	if (!text) return caption
	if (mode === "prefix") return [text.trim(), now].filter(Boolean).join(other)
	if (mode === "suffix") return [now, text.trim()].filter(Boolean).join(other)
	if (mode === "replace") return caption.replaceAll(text, other)
	const kept = tagsOf(now).filter(tag => tag.toLowerCase() !== text.trim().toLowerCase())
	return kept.length === tagsOf(now).length ? caption : kept.join(", ")
}

/** Every tag with its number of captions, the most frequent first. @param {string[]} captions */
function tagCounts(captions) {
	/** @type {Map<string, number>} */
	const counts = new Map()
	for (const caption of captions) {
		for (const tag of new Set(tagsOf(caption))) counts.set(tag, (counts.get(tag) ?? 0) + 1)
	}
	return [...counts].sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]))
}

export function BulkCaptions() {
	const {dataset, undo} = useStore(desk)
	const [mode, setMode] = useState("prefix")
	const [text, setText] = useState("")
	const [other, setOther] = useState("")
	const [separator, setSeparator] = useState(", ")
	const joins = mode === "prefix" || mode === "suffix"
	const images = dataset?.pictures ?? []
	const words = t.captions
	/** @type {Labels} */
	const changes = {}
	for (const each of images) {
		const after = edited(mode, each.caption, text, joins ? separator : other)
		if (after !== each.caption) changes[each.name] = after
	}
	const count = Object.keys(changes).length
	const counts = tagCounts(images.map(each => each.caption))
	return html`<details class="fold train-bulk">
		<summary>${words.bulk}</summary>
		<form class="stack" onSubmit=${submits(() => saveCaptions(changes, words.modes[mode]).catch(showError))}>
			<${Segmented} label=${words.mode} value=${mode} options=${words.modes} onChange=${setMode} />
			<div class="row wrap train-bulk-row">
				<${Text} label=${words.fields[mode]} value=${text} onChange=${setText} class="train-bulk-text" />
				${joins && html`<${Select} label=${words.separator} value=${separator} options=${words.separators} onChange=${setSeparator} />`}
				${mode === "replace" && html`<${Text} label=${words.by} value=${other} onChange=${setOther} />`}
				<${Button} type="submit" kind="primary" disabled=${!count}>${words.apply(count)}<//>
			</div>
			${
				counts.length > 0 &&
				html`<div class="row wrap" role="group" aria-label=${words.tags}>
					${counts.slice(0, MAX_TAGS).map(
						([tag, n]) => html`<button
							key=${tag}
							type="button"
							class="chip"
							title=${words.choose}
							onClick=${() => {
								setText(tag)
								if (joins) setMode("remove")
							}}
						><span class="clip train-tag">${tag}</span> <span class="num muted">${n}</span></button>`
					)}
					${counts.length > MAX_TAGS && html`<span class="muted small">${words.more(counts.length - MAX_TAGS)}</span>`}
				</div>`
			}
		</form>
		<${Captioner} />
		${undo.length > 0 && html`<${Button} size="small" icon="undo" onClick=${() => undoCaptions().catch(showError)}>${words.undo(undo.at(-1)?.label ?? "")}<//>`}
	</details>`
}
