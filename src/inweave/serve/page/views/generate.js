// Generate: the form, the image, the gallery.
import {
	api,
	app,
	Button,
	cancelJob,
	formatTag,
	html,
	parseTags,
	showError,
	submits,
	tagName,
	texts,
	toast,
	useBusy,
	usePageDrop,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {draft, randomSeed, submitDraft} from "./generate/draft.js"
import {Form, Seed} from "./generate/form.js"
import {Gallery, imagesOf, keyOf} from "./generate/gallery.js"
import {Finished, Nothing, Running, removeImage, reuseSettings} from "./generate/stage.js"

const t = texts.generate

export function View() {
	const {ended, active} = useStore(app)
	const [selected, setSelected] = useState(/** @type {string | null} */ (null))
	const [busy, during] = useBusy()
	const images = imagesOf(ended)
	const current = active?.find(job => job.operation !== "train")
	const chosen = images.find(item => keyOf(item) === selected)
	const shown = chosen ?? (current ? undefined : images[0])
	const veil = usePageDrop(files => restore(files[0]).catch(showError), t.dropHint)
	const show = () => {
		setSelected(null)
		document.querySelector(".generate-stage")?.scrollIntoView({block: "nearest"}) // it is below the form on a phone
	}
	const submit = () => during(submitDraft(draft, {operation: "image_generation"}).then(show))
	/** @param {number} by */
	const step = by => {
		const index = shown ? images.indexOf(shown) : -1
		const next = images[Math.max(0, Math.min(images.length - 1, index + by))]
		if (next) setSelected(keyOf(next))
	}
	useShortcuts(t.title, [
		["mod+Enter", t.submit, submit],
		["Escape", t.keys.cancel, () => current && cancelJob(current.id).catch(showError)],
		["p", t.keys.prompt, () => document.getElementById("prompt")?.focus()],
		["/", t.search, () => document.getElementById("lora-search")?.focus()],
		["r", t.roll, () => draft.set({seed: randomSeed()})],
		["l", t.keys.lock, () => draft.set(state => ({locked: !state.locked}))],
		["k", t.keys.previous, () => step(-1)],
		["j", t.keys.next, () => step(1)],
		["u", t.keys.use, () => shown && reuseSettings(shown)],
		["Delete", t.keys.remove, () => shown && removeImage(shown)]
	])
	return html`<h1 class="visually-hidden">${t.title}</h1>
		<div class="generate">
			<form class="generate-form card" onSubmit=${submits(submit)}>
				<${Form} draft=${draft} />
				<div class="stack generate-submit">
					<${Seed} draft=${draft} />
					<${Button} kind="primary" size="large" type="submit" busy=${busy}>${current ? t.submitMore : t.submit}<//>
				</div>
			</form>
			<div class="generate-result">
				<div class="generate-stage card">
					${shown ? html`<${Finished} key=${keyOf(shown)} item=${shown} />` : current ? html`<${Running} key=${current.id} job=${current} />` : ended && html`<${Nothing} />`}
				</div>
				${ended && html`<${Gallery} images=${images} selected=${shown ? keyOf(shown) : null} onSelect=${item => setSelected(keyOf(item))} />`}
			</div>
		</div>
		${veil}`
}

/** Load the settings of an image file into the form, and report what is missing. @param {File} file */
async function restore(file) {
	/** @type {ImageMetadata} */
	const {settings, loras, warnings} = await api("/v1/pictures/settings", {method: "POST", body: file})
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
	draft.take({...settings, prompt})
	if (warnings.length) toast(t.restoredWarnings, {kind: "warning", details: warnings})
	else toast(t.restored)
}
