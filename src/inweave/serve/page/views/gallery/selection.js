// What can be done with the selected images.
import {api, Button, Confirm, html, showError, texts, toast, useState, useStore} from "../../kit.js"
import {trash} from "../generate/gallery.js"
import {Albums, leaveAlbum} from "./albums.js"
import {clear, drop, gallery, load, loadFacets, put, selectAll, selectedIds, star} from "./state.js"
import {t} from "./strings.js"

/** Move images into the trash; a message brings them back. @param {string[]} ids */
export async function trashImages(ids) {
	await trash(ids, rows => {
		if (!gallery.get().filters.trashed) put(rows)
		return loadFacets()
	})
	drop(ids)
	await loadFacets()
}

export const trashSelected = () => trashImages(selectedIds())

/** @param {string[]} ids */
export async function restoreImages(ids) {
	const {images} = await api("/v1/gallery/restore", {json: {images: ids}})
	toast(t.restored(images.length))
	drop(ids)
	await load()
}

/** @param {string[]} ids */
export async function purgeImages(ids) {
	const {purged} = await api("/v1/gallery/purge", {json: {images: ids}})
	toast(t.purged(purged))
	drop(ids)
	await load()
}

/** A bar at the bottom while images are selected. */
export function Selection() {
	const {selected, filters, images} = useStore(gallery)
	const [asking, setAsking] = useState("")
	const rows = (images ?? []).filter(row => selected.has(row.id))
	const starred = rows.every(row => row.starred)
	const close = () => setAsking("")
	/** @param {Promise<unknown>} call */
	const run = call => call.catch(showError)
	return html`${
		selected.size > 0 &&
		html`<div class="row wrap gallery-bar" role="toolbar" aria-label=${t.selection}>
			<span class="num">${t.selected(selected.size)}</span>
			<${Button} size="small" kind="quiet" onClick=${selectAll}>${t.selectAll}<//>
			<span class="grow"></span>
			${
				filters.trashed
					? html`<${Button} size="small" icon="undo" onClick=${() => run(restoreImages(selectedIds()))}>${t.restore}<//>
						<${Button} size="small" kind="danger" icon="trash" onClick=${() => setAsking("purge")}>${t.purge}<//>`
					: html`<${Button} size="small" icon="star" onClick=${() => run(star(selectedIds(), !starred))}>${starred ? t.unstarAll : t.starAll}<//>
						<${Button} size="small" icon="plus" onClick=${() => setAsking("albums")}>${t.toAlbum}<//>
						${filters.album && html`<${Button} size="small" icon="minus" onClick=${() => run(leaveAlbum(selectedIds()))}>${t.fromAlbum}<//>`}
						<${Button} size="small" kind="danger" icon="trash" onClick=${() => run(trashSelected())}>${texts.actions.delete}<//>`
			}
			<${Button} size="small" kind="quiet" icon="close" label=${t.clear} onClick=${clear} />
		</div>`
	}
	${asking === "albums" && html`<${Albums} images=${selectedIds()} onClose=${close} />`}
	${asking === "purge" && html`<${Confirm} title=${t.purgeTitle(selected.size)} text=${t.purgeText} confirm=${t.purge} onConfirm=${() => run(purgeImages(selectedIds()))} onClose=${close} />`}`
}
