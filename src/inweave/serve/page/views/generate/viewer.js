// An image on the whole screen: wheel, double click or two fingers zoom, dragging pans, arrow keys show the next one.
import {Button, html, useEffect, useRef} from "../../kit.js"
import {useZoom} from "../gallery/zoom.js"
import {t} from "./strings.js"

/**
 * @param {{ item: GalleryImage, name: string, onStep: (by: number) => void, onClose: () => void }} props
 */
export function Viewer({item, name, onStep, onClose}) {
	const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null))
	const {view, handlers, zoomBy, panBy, fit} = useZoom(item.image.url, onStep)
	useEffect(() => {
		const element = dialog.current
		const before = /** @type {HTMLElement | null} */ (document.activeElement)
		element?.showModal()
		return () => {
			if (document.fullscreenElement) document.exitFullscreen().catch(() => {})
			element?.close()
			before?.focus()
		}
	}, [])
	const whole = () =>
		(document.fullscreenElement ? document.exitFullscreen() : dialog.current?.requestFullscreen?.())?.catch(() => {})
	/** @type {Record<string, () => unknown>} */
	const keys = {
		ArrowLeft: () => onStep(-1),
		ArrowRight: () => onStep(1),
		ArrowUp: () => panBy(0, 80),
		ArrowDown: () => panBy(0, -80),
		"+": () => zoomBy(1.4),
		"=": () => zoomBy(1.4),
		"-": () => zoomBy(1 / 1.4),
		0: fit,
		f: whole
	}
	/** @param {KeyboardEvent} event */
	const press = event => {
		const run = keys[event.key]
		event.stopPropagation() // shortcuts of the form do not act behind it
		if (!run || event.ctrlKey || event.metaKey || event.altKey) return
		event.preventDefault()
		run()
	}
	return html`<dialog
		ref=${dialog}
		class="stage-viewer"
		aria-label=${t.viewer}
		onKeyDown=${press}
		onCancel=${event => {
			event.preventDefault()
			onClose()
		}}
	>
		<div class="row stage-viewer-head">
			<${Button} kind="quiet" icon="close" label=${t.close} onClick=${onClose} />
			<span class="grow"></span>
			<${Button} kind="quiet" icon="minus" label=${t.zoomOut} disabled=${view.scale <= 1} onClick=${() => zoomBy(1 / 1.4)} />
			<span class="num small">${t.zoom(Math.round(100 * view.scale))}</span>
			<${Button} kind="quiet" icon="plus" label=${t.zoomIn} onClick=${() => zoomBy(1.4)} />
			<${Button} kind="quiet" label=${t.whole} icon="image" disabled=${view.scale === 1} onClick=${fit} />
			<${Button} kind="quiet" icon="expand" label=${t.fullScreen} onClick=${whole} />
		</div>
		<div class="stage-viewer-frame" ...${handlers} data-zoomed=${view.scale > 1}>
			<img class="stage-viewer-image" key=${item.image.url} src=${item.image.url} alt=${name} draggable="false" style=${{"--x": `${view.x}px`, "--y": `${view.y}px`, "--scale": view.scale}} />
		</div>
	</dialog>`
}
