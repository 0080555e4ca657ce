// Edit: image to image, and inpainting where a mask is painted.
import {
	Button,
	DropZone,
	html,
	navigate,
	Segmented,
	Slider,
	showError,
	submits,
	texts,
	useBusy,
	useEffect,
	usePageDrop,
	useRoute,
	useShortcuts,
	useStore
} from "../kit.js"
import {Canvas} from "./edit/canvas.js"
import {isExtended, Many, Outpaint} from "./edit/more.js"
import {Result, useAsSource, useResults} from "./edit/result.js"
import {cancel, draft, edit, openAddress, openFile, submit, zoomBy} from "./edit/state.js"
import {t} from "./edit/strings.js"
import {fit, setFeather, setSize, Tools, takeAlpha, toggleMask} from "./edit/tools.js"
import {Form, Seed} from "./generate/form.js"
import {Gallery, placeOf, useImages} from "./generate/gallery.js"

const IMAGES = "image/*"

/** @param {File[]} files */
const open = files => openFile(files[0]).catch(showError)

export function View() {
	const {params} = useRoute()
	const {source, shown, mask, version: _changed} = useStore(edit) // a mask is changed in place
	const form = useStore(draft)
	const painted = (mask?.painted ?? 0) > 0
	const [busy, during] = useBusy()
	const {images, current} = useResults()
	const veil = usePageDrop(open, t.dropHint)
	useEffect(() => {
		openAddress(params).catch(showError)
	}, [params])
	const run = () => {
		const work = document.querySelector(".edit-work")
		const sent = submit().then(() => work && work.getBoundingClientRect().top < 0 && work.scrollIntoView())
		during(sent) // the form is below the image on a phone
	}
	useEditKeys(run, () => images[0] && useAsSource(images[0]))
	return html`<h1 class="visually-hidden">${t.title}</h1>
		<div class="generate edit">
			<div class="edit-work" data-shown=${shown}>
				${source ? html`<${Work} images=${images} current=${current} shown=${shown} />` : html`<${Start} />`}
			</div>
			<form class="generate-form card" onSubmit=${submits(run)}>
				<${Form} draft=${draft} size=${t.ownSize}><${Strength} /><${Outpaint} /><${Many} /><//>
				<div class="stack generate-submit">
					<${Seed} draft=${draft} />
					<${Button} kind="primary" size="large" type="submit" busy=${busy} disabled=${!source}>
						${!source ? t.choose : isExtended(form) ? t.extend : painted ? t.inpaint : t.transform}
					<//>
				</div>
			</form>
		</div>
		${veil}`
}

function Start() {
	const {images, older} = useImages()
	return html`<${DropZone} onFiles=${open} accept=${IMAGES} label=${t.drop} hint=${t.dropText} icon="image" />
		${images.length > 0 && html`<${Gallery} images=${images} older=${older} selected=${null} onSelect=${each => navigate("edit", placeOf(each))} />`}`
}

/** @param {{ images: any[], current: any, shown: string }} props */
const Work = ({images, current, shown}) => html`<div class="row wrap spread edit-head">
		<div class="edit-switch">
			<${Segmented} label=${t.show} value=${shown} options=${t.parts} onChange=${value => edit.set({shown: value})} />
		</div>
		<${DropZone} onFiles=${open} accept=${IMAGES} label=${t.another} icon="image" compact />
	</div>
	<section class="card edit-image" aria-label=${t.parts.image}>
		<${Canvas} />
		<${Tools} />
		<p class="small muted edit-hint" id="edit-hint">${t.hint}</p>
	</section>
	<section class="card edit-result" aria-label=${t.parts.result}>
		<${Result} images=${images} current=${current} />
	</section>`

function Strength() {
	const strength = useStore(draft).strength ?? 0.75
	/** @param {number} value */
	const set = value => draft.set({strength: Math.min(1, Math.max(0, value))})
	return html`<div>
		<${Slider} label=${t.strength} value=${strength} onChange=${set} />
		<p class="field-hint">${t.strengthHint}</p>
	</div>`
}

/** @param {() => void} run @param {() => void} proceed */
function useEditKeys(run, proceed) {
	const mask = () => edit.get().mask
	const keys = t.keys
	useShortcuts(t.title, [
		["mod+Enter", keys.run, run],
		["Escape", texts.generate.keys.cancel, () => cancel().catch(showError)],
		["p", texts.generate.keys.prompt, () => document.getElementById("prompt")?.focus()],
		["b", t.names.brush, () => edit.set({tool: "brush"})],
		["e", t.names.eraser, () => edit.set({tool: "eraser"})],
		["h", t.names.hand, () => edit.set({tool: "hand"})],
		["[", keys.smaller, () => setSize(edit.get().size / 1.2)],
		["]", keys.larger, () => setSize(Math.max(edit.get().size * 1.2, edit.get().size + 1))],
		["{", keys.harder, () => setFeather((draft.get().feather ?? 0) - 2)],
		["}", keys.softer, () => setFeather((draft.get().feather ?? 0) + 2)],
		["mod+z", t.undo, event => (event.shiftKey ? mask()?.redo() : mask()?.undo()), true],
		["mod+y", t.redo, () => mask()?.redo(), true],
		["Delete", t.clear, () => mask()?.clear()],
		["i", t.invert, () => mask()?.invert()],
		["a", t.alpha, takeAlpha],
		["m", t.hide, toggleMask],
		["+", t.zoomIn, () => zoomBy(1.25)],
		["-", t.zoomOut, () => zoomBy(0.8)],
		["0", t.fit, fit],
		["x", keys.other, () => edit.set(({shown}) => ({shown: shown === "result" ? "image" : "result"}))],
		["s", t.useResult, proceed]
	])
}
