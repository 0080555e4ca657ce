// One image on the whole screen: zoom and pan, the next and the previous one, its settings, what can be done with it.
import {
	ago,
	api,
	Button,
	bytes,
	cx,
	decimal,
	href,
	html,
	nameOf,
	navigate,
	persisted,
	printable,
	remember,
	showError,
	Toasts,
	texts,
	useEffect,
	useRef,
	useState,
	useStore
} from "../../kit.js"
import {takeMetadata} from "../generate/metadata.js"
import {compareImage, metadataOf} from "../generate/stage.js"
import {purgeImages, restoreImages, trashImages} from "./selection.js"
import {address, gallery, loadMore, star} from "./state.js"
import {t} from "./strings.js"
import {useZoom} from "./zoom.js"

const words = texts.generate
const info = persisted("gallery-info", matchMedia("(min-width: 900px)").matches)

/** @param {{ id: string, onClose: () => void }} props */
export function Viewer({id: first, onClose}) {
	const {images, next, total, filters} = useStore(gallery)
	const [id, setId] = useState(first)
	const [other, setOther] = useState(/** @type {GalleryRow | null} */ (null)) // one that is not in the list
	const [details, setDetails] = useState(info.read())
	const dialog = useRef(/** @type {HTMLDialogElement | null} */ (null))
	const index = images?.findIndex(row => row.id === id) ?? -1
	const row = images?.[index] ?? (other?.id === id ? other : null)
	useEffect(() => setId(first), [first])
	useEffect(() => {
		dialog.current?.showModal()
		return () => dialog.current?.close()
	}, [])
	useEffect(() => {
		remember("gallery", {...address(filters), image: id})
		if (images && index < 0) {
			api(`/v1/gallery/${encodeURIComponent(id)}`).then(setOther, error => {
				showError(error)
				onClose()
			})
		}
		if (next !== null && index >= (images?.length ?? 0) - 5) loadMore().catch(showError)
		for (const each of [images?.[index - 1], images?.[index + 1]]) if (each) new Image().src = each.url
	}, [id, index, images])
	/** @param {number} by */
	const step = by => {
		const neighbor = images?.[index + by]
		if (index >= 0 && neighbor) setId(neighbor.id)
	}
	const {view, handlers, zoomBy, panBy, fit} = useZoom(id, step)
	/** @param {(ids: string[]) => Promise<void>} call the image leaves the list: the next one is shown */
	const leave = call => {
		const neighbor = images?.[index + 1] ?? images?.[index - 1]
		call([id]).then(() => (neighbor && neighbor.id !== id ? setId(neighbor.id) : onClose()), showError)
	}
	const toggleDetails = () => {
		info.write(!details)
		setDetails(!details)
	}
	const use = () =>
		metadataOf(id).then(stored => {
			takeMetadata(stored)
			navigate("generate")
		}, showError)
	/** @type {Record<string, () => unknown>} */
	const keys = {
		ArrowLeft: () => step(-1),
		ArrowRight: () => step(1),
		ArrowUp: () => panBy(0, 80),
		ArrowDown: () => panBy(0, -80),
		"+": () => zoomBy(1.4),
		"=": () => zoomBy(1.4),
		"-": () => zoomBy(1 / 1.4),
		0: fit,
		i: toggleDetails,
		s: () => row && star([id], !row.starred).catch(showError),
		u: use,
		Delete: () => row && leave(filters.trashed ? restoreImages : trashImages)
	}
	/** @param {KeyboardEvent} event */
	const press = event => {
		const run = keys[event.key]
		if (!run || event.ctrlKey || event.metaKey || event.altKey) return
		event.preventDefault()
		run()
	}
	const name = row ? printable(row.prompt.slice(0, 200)) || row.name || t.noPrompt : t.viewer.title
	return html`<dialog
		ref=${dialog}
		class=${cx("gallery-viewer", details && "gallery-viewer-details")}
		aria-label=${name}
		onKeyDown=${press}
		onCancel=${event => {
			event.preventDefault()
			onClose()
		}}
	>
		<div class="row gallery-viewer-head">
			<${Button} kind="quiet" icon="close" label=${texts.actions.close} onClick=${onClose} />
			<span class="num small clip">${index >= 0 ? t.viewer.place(index + 1, Math.max(total, images?.length ?? 0)) : ""}</span>
			<span class="grow"></span>
			<${Button} kind="quiet" icon="minus" label=${t.viewer.zoomOut} disabled=${view.scale <= 1} onClick=${() => zoomBy(1 / 1.4)} />
			<span class="num small gallery-viewer-zoom">${t.viewer.zoom(Math.round(100 * view.scale))}</span>
			<${Button} kind="quiet" icon="plus" label=${t.viewer.zoomIn} onClick=${() => zoomBy(1.4)} />
			<${Button} kind="quiet" icon="expand" label=${t.viewer.fit} disabled=${view.scale === 1} onClick=${fit} />
			<${Button} kind="quiet" icon="info" label=${t.viewer.info} aria-pressed=${details} onClick=${toggleDetails} />
		</div>
		<div class="gallery-viewer-frame" ...${handlers} data-zoomed=${view.scale > 1}>
			${row && html`<img key=${row.id} class="gallery-viewer-image" src=${row.url} alt=${name} draggable="false" style=${{"--x": `${view.x}px`, "--y": `${view.y}px`, "--scale": view.scale}} />`}
		</div>
		<${Button} class="gallery-viewer-step gallery-viewer-previous" icon="previous" label=${t.viewer.previous} disabled=${index <= 0} onClick=${() => step(-1)} />
		<${Button} class="gallery-viewer-step gallery-viewer-next" icon="next" label=${t.viewer.next} disabled=${index < 0 || index >= (images?.length ?? 0) - 1} onClick=${() => step(1)} />
		${details && row && html`<${Details} key=${row.id} row=${row} />`}
		${
			row &&
			html`<div class="row wrap gallery-viewer-foot">
				${
					row.trashed
						? html`<${Button} icon="undo" onClick=${() => leave(restoreImages)}>${t.restore}<//>
							<${Button} kind="danger" icon="trash" onClick=${() => leave(purgeImages)}>${t.purge}<//>`
						: html`<${Button} kind="primary" icon="reuse" onClick=${use}>${t.viewer.use}<//>
							<${Button} icon="edit" href=${href("edit", {gallery: id})}>${t.viewer.edit}<//>
							${row.loras.length > 0 && html`<${Button} icon="compare" onClick=${() => compareImage(id)}>${t.viewer.compare}<//>`}
							<span class="grow"></span>
							<${Button} kind="quiet" icon="star" class="gallery-viewer-star" label=${t.viewer.star} aria-pressed=${row.starred} onClick=${() => star([id], !row.starred).catch(showError)} />
							<${Button} kind="quiet" icon="download" label=${texts.actions.download} href=${row.url} download=${row.name} />
							<${Button} kind="quiet" icon="trash" label=${texts.actions.delete} onClick=${() => leave(trashImages)} />`
				}
			</div>`
		}
		<${Toasts} />
	</dialog>`
}

/** The facts of an image, and the settings in its file. @param {{ row: GalleryRow }} props */
function Details({row}) {
	const [stored, setStored] = useState(/** @type {ImageMetadata | null} */ (null))
	const [failed, setFailed] = useState(false)
	const {albums} = useStore(gallery)
	useEffect(() => {
		metadataOf(row.id).then(setStored, () => setFailed(true))
	}, [row.id])
	const settings = stored?.settings ?? {}
	const names = albums.filter(each => row.albums.includes(each.id)).map(each => printable(each.name))
	/** @type {[string, any][]} */
	const rows = [
		[words.negative, row.negative_prompt],
		[words.loras, row.loras.map(nameOf).join(", ")],
		[words.seed, row.seed],
		[words.steps, settings.steps],
		[words.guidance, settings.guidance === undefined ? undefined : decimal(settings.guidance)],
		[words.sampler, [settings.sampler, settings.schedule].filter(Boolean).join(", ")],
		[words.model, printable(row.model)],
		[t.viewer.size, `${row.width} × ${row.height}`],
		[t.viewer.made, `${ago(row.created)}, ${new Date(1000 * row.created).toLocaleString()}`],
		[t.album, names.join(", ")],
		[t.viewer.file, `${printable(row.path)}, ${bytes(row.bytes)}`]
	]
	return html`<aside class="gallery-viewer-info" aria-label=${t.viewer.info} tabindex="0">
		<p>${row.prompt || html`<span class="muted">${t.noPrompt}</span>`}</p>
		${failed && html`<p class="muted small">${t.viewer.noSettings}</p>`}
		<dl>
			${rows.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([label, value]) => html`<div><dt>${label}</dt><dd class="num">${value}</dd></div>`)}
		</dl>
		${!row.job && html`<p class="muted small">${t.viewer.imported}</p>`}
	</aside>`
}
