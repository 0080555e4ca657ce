// Captions written by the worker's own image-to-text model, one image after the other.
import {
	api,
	app,
	Button,
	html,
	Segmented,
	showError,
	submits,
	Text,
	Thread,
	useRef,
	useState,
	useStore
} from "../../kit.js"
import {desk, path, saveCaptions} from "./state.js"
import {t} from "./strings.js"

const words = t.captions

export function Captioner() {
	const {dataset} = useStore(desk)
	const able = useStore(app).capabilities?.features.includes("captions")
	const [which, setWhich] = useState(/** @type {string} */ ("missing"))
	const [instruction, setInstruction] = useState("")
	const [at, setAt] = useState(/** @type {{ done: number, total: number } | null} */ (null))
	const stop = useRef(/** @type {AbortController | null} */ (null))
	if (!able) return html`<p class="field-hint">${words.noModel}</p>`
	const images = (dataset?.pictures ?? []).filter(each => which === "all" || !each.caption.trim())
	const write = async () => {
		if (!dataset) return
		const control = new AbortController()
		stop.current = control
		/** @type {Labels} */
		const captions = {}
		setAt({done: 0, total: images.length})
		try {
			for (const [index, {name}] of images.entries()) {
				const address = `${path(dataset.id)}/pictures/${encodeURIComponent(name)}/caption`
				const {caption} = await api(address, {json: {instruction}, signal: control.signal})
				captions[name] = caption
				setAt({done: index + 1, total: images.length})
			}
		} finally {
			setAt(null)
			// those that were written are kept, and can be undone together
			if (desk.get().dataset?.id === dataset.id) await saveCaptions(captions, words.model)
		}
	}
	return html`<form class="stack" onSubmit=${submits(() => write().catch(showError))}>
		<h3>${words.model}</h3>
		<div class="row wrap train-bulk-row">
			<${Segmented} label=${words.which} value=${which} options=${words.whiches} onChange=${setWhich} />
			<${Text} label=${words.question} placeholder=${words.questionHint} value=${instruction} maxlength="500" onChange=${setInstruction} />
			<${Button} type="submit" disabled=${!images.length || at !== null}>${words.write(images.length)}<//>
		</div>
		${
			at &&
			html`<div class="row" role="status">
				<span class="small">${words.writing(at.done, at.total)}</span>
				<span class="grow"><${Thread} percent=${(100 * at.done) / at.total} label=${words.writing(at.done, at.total)} /></span>
				<${Button} size="small" icon="stop" onClick=${() => stop.current?.abort()}>${words.stop}<//>
			</div>`
		}
	</form>`
}
