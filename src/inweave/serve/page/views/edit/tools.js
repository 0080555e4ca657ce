// The toolbar: brushes, undo, zoom.
import {Button, html, Slider, useStore} from "../../kit.js"
import {draft, edit, placeOf, zoomBy} from "./state.js"
import {t} from "./strings.js"

const TOOLS = /** @type {const} */ (["brush", "eraser", "hand"])

/** @param {number} size of the brush */
export const setSize = size => edit.set({size: Math.max(1, Math.round(size))})
/** @param {number} feather */
export const setFeather = feather => draft.set({feather: Math.min(256, Math.max(0, Math.round(feather)))})
export const fit = () => edit.set({camera: null})
export const toggleMask = () => edit.set(({hidden}) => ({hidden: !hidden}))
export const takeAlpha = () => {
	const {source, mask} = edit.get()
	if (source?.holes) mask?.takeAlpha(source.holes)
}

export function Tools() {
	const state = useStore(edit)
	const feather = useStore(draft).feather ?? 0
	const {source, mask, tool, size, version: _changed} = state // a mask is changed in place
	if (!source || !mask) return null
	const {zoom} = placeOf(state)
	const longest = Math.max(source.width, source.height)
	const share = mask.painted / (source.width * source.height)
	return html`<div class="edit-tools">
		<div class="row wrap" role="toolbar" aria-label=${t.tools}>
			<div class="row edit-group" role="group" aria-label=${t.tool}>
				${TOOLS.map(name => html`<${Button} key=${name} kind="quiet" icon=${name} label=${t.names[name]} aria-pressed=${tool === name} onClick=${() => edit.set({tool: name})} />`)}
			</div>
			<div class="row edit-group">
				<${Button} kind="quiet" icon="undo" label=${t.undo} disabled=${!mask.undos.length} onClick=${() => mask.undo()} />
				<${Button} kind="quiet" icon="redo" label=${t.redo} disabled=${!mask.redos.length} onClick=${() => mask.redo()} />
				<${Button} kind="quiet" icon="trash" label=${t.clear} disabled=${!mask.painted} onClick=${() => mask.clear()} />
				<${Button} kind="quiet" icon="invert" label=${t.invert} onClick=${() => mask.invert()} />
				${source.holes && html`<${Button} kind="quiet" icon="holes" label=${t.alpha} onClick=${takeAlpha} />`}
				<${Button} kind="quiet" icon="eye" label=${t.hide} aria-pressed=${state.hidden} onClick=${toggleMask} />
			</div>
			<div class="row edit-group">
				<${Button} kind="quiet" icon="minus" label=${t.zoomOut} onClick=${() => zoomBy(0.8)} />
				<span class="num small edit-zoom">${Math.round(zoom * 100)}%</span>
				<${Button} kind="quiet" icon="plus" label=${t.zoomIn} onClick=${() => zoomBy(1.25)} />
				<${Button} kind="quiet" icon="expand" label=${t.fit} onClick=${fit} />
			</div>
		</div>
		<div class="edit-sliders">
			<${Slider} label=${t.size} min=${1} max=${Math.max(2, Math.round(longest / 2))} step=${1} value=${size} onChange=${setSize} />
			<${Slider} label=${t.softness} min=${0} max=${Math.min(256, Math.max(8, Math.round(longest / 8)))} step=${1} value=${feather} onChange=${setFeather} />
		</div>
		<p class="small muted num" role="status">${source.width} × ${source.height} · ${mask.painted ? t.share(share) : t.noMask}</p>
	</div>`
}
