// Generate: the form, the image, the gallery.
import {
	api,
	app,
	Button,
	cancelJob,
	findModel,
	html,
	showError,
	submits,
	texts,
	useBusy,
	useEffect,
	usePageDrop,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {draft, randomSeed, submitDraft} from "./generate/draft.js"
import {Form, Seed} from "./generate/form.js"
import {Gallery, keyOf, useImages} from "./generate/gallery.js"
import {takeMetadata} from "./generate/metadata.js"
import {Finished, Nothing, Running, removeImage, reuseSettings} from "./generate/stage.js"

const t = texts.generate

export function View() {
	const {active} = useStore(app)
	const {images, loaded, older} = useImages()
	const [selected, setSelected] = useState(/** @type {string | null} */ (null))
	const [busy, during] = useBusy()
	const current = active?.find(job => job.operation !== "train")
	const chosen = images.find(item => keyOf(item) === selected)
	const shown = chosen ?? (current ? undefined : images[0])
	const restore = (/** @type {File[]} */ [file]) => api("/v1/pictures/settings", {method: "POST", body: file})
	const veil = usePageDrop(files => restore(files).then(takeMetadata).catch(showError), t.dropHint)
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
				<${Form} draft=${draft}><${EditImages} /><//>
				<div class="stack generate-submit">
					<${Seed} draft=${draft} />
					<${Button} kind="primary" size="large" type="submit" busy=${busy}>${current ? t.submitMore : t.submit}<//>
				</div>
			</form>
			<div class="generate-result">
				<div class="generate-stage card">
					${shown ? html`<${Finished} item=${shown} onStep=${step} />` : current ? html`<${Running} key=${current.id} job=${current} />` : loaded && html`<${Nothing} />`}
				</div>
				${loaded && html`<${Gallery} images=${images} older=${older} selected=${shown ? keyOf(shown) : null} onSelect=${item => setSelected(keyOf(item))} />`}
			</div>
		</div>
		${veil}`
}

/** The reference images of a model that reads some; loaded when it is chosen. */
function EditImages() {
	const {model} = useStore(draft)
	const most = findModel(useStore(app).capabilities, model)?.references ?? 0
	const [module, setModule] = useState(/** @type {any} */ (null))
	useEffect(() => {
		if (most && !module) import("./generate/references.js").then(setModule, showError)
	}, [most])
	return most > 0 && module && html`<${module.References} draft=${draft} most=${most} />`
}
