// Extending an image at its sides, and transforming many images with the same settings.
import {api, DropZone, html, NumberField, showError, toast, useBusy, useStore} from "../../kit.js"
import {submitDraft} from "../generate/draft.js"
import {t} from "../generate/strings.js"
import {draft} from "./state.js"

const SIDES = /** @type {const} */ (["left", "top", "right", "bottom"])

/** Whether the form asks for more at a side. @param {Draft} state */
export const isExtended = state => SIDES.some(side => Boolean(state[`outpaint_${side}`]))

export function Outpaint() {
	const state = useStore(draft)
	return html`<details class="fold" open=${isExtended(state)}>
		<summary>${t.outpaint}</summary>
		<div class="stack stack-2">
			<p class="small muted">${t.outpaintText}</p>
			<div class="field-pairs">
				${SIDES.map(side => html`<${NumberField} key=${side} label=${t.sides[side]} min=${0} max=${4096} step=${8} placeholder="0" value=${state[`outpaint_${side}`]} onChange=${value => draft.set({[`outpaint_${side}`]: value || undefined})} />`)}
			</div>
		</div>
	</details>`
}

export function Many() {
	const [busy, during] = useBusy()
	/** @param {File[]} files */
	const run = async files => {
		let n = 0
		for (const file of files) {
			try {
				const {id} = await api("/v1/uploads", {method: "POST", body: file})
				await submitDraft(draft, {operation: "image_transform", image: id, feather: undefined})
				n += 1
			} catch (error) {
				toast(t.unreadable(file.name), {kind: "error", details: [/** @type {Error} */ (error).message]})
			}
		}
		if (n) toast(t.queued(n))
	}
	return html`<details class="fold">
		<summary>${t.many}</summary>
		<div class="stack stack-2">
			<p class="small muted">${t.manyText}</p>
			<${DropZone} onFiles=${files => !busy && during(run(files)).catch(showError)} accept="image/*" multiple label=${t.manyDrop} icon="image" compact />
		</div>
	</details>`
}
