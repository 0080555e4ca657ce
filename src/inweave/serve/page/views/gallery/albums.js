// Albums: put images into one, rename and delete it.
import {
	api,
	Button,
	Confirm,
	Dialog,
	html,
	printable,
	showError,
	submits,
	Text,
	toast,
	useBusy,
	useState,
	useStore
} from "../../kit.js"
import {clear, filter, gallery, load, loadFacets} from "./state.js"
import {t} from "./strings.js"

/** Choose an album for images, or create one. @param {{ images: string[], onClose: () => void }} props */
export function Albums({images, onClose}) {
	const {albums} = useStore(gallery)
	const [name, setName] = useState("")
	const [busy, during] = useBusy()
	/** @param {string} id @param {string} title */
	const add = async (id, title) => {
		const answer = await api(`/v1/gallery/albums/${id}/images`, {json: {images}})
		toast(t.albums.added(answer.images, printable(title)))
		clear()
		onClose()
		await loadFacets()
	}
	const create = async () => {
		const album = await api("/v1/gallery/albums", {json: {name}})
		await add(album.id, album.name)
	}
	return html`<${Dialog} title=${t.albums.title(images.length)} onClose=${onClose}>
		<ul class="stack stack-2">
			${albums.map(
				each => html`<li key=${each.id}>
					<button type="button" class="row gallery-album" disabled=${busy} onClick=${() => during(add(each.id, each.name))}>
						<span class="gallery-cover cover">${each.cover && html`<img src=${each.cover} alt="" />`}</span>
						<span class="grow clip">${printable(each.name)}</span>
						<span class="muted small">${t.albums.images(each.images)}</span>
					</button>
				</li>`
			)}
		</ul>
		<form class="row gallery-form" onSubmit=${submits(() => during(create()))}>
			<${Text} label=${t.albums.name} value=${name} required maxlength="200" autofocus=${!albums.length} onChange=${setName} />
			<${Button} type="submit" kind="primary" busy=${busy} disabled=${!name.trim()}>${t.albums.create}<//>
		</form>
	<//>`
}

/** Rename or delete the album that is shown. @param {{ id: string }} props */
export function AlbumName({id}) {
	const album = useStore(gallery).albums.find(each => each.id === id)
	const [asking, setAsking] = useState("")
	const [name, setName] = useState(album?.name ?? "")
	const [busy, during] = useBusy()
	if (!album) return null
	const rename = async () => {
		await api(`/v1/gallery/albums/${id}`, {method: "PATCH", json: {name}})
		setAsking("")
		await loadFacets()
	}
	const remove = async () => {
		await api(`/v1/gallery/albums/${id}`, {method: "DELETE"})
		toast(t.albums.deleted(printable(album.name)))
		await filter({album: ""})
	}
	const close = () => setAsking("")
	return html`<${Button} size="small" icon="edit" onClick=${() => {
		setName(album.name)
		setAsking("rename")
	}}>${t.albums.rename}<//>
		<${Button} size="small" icon="trash" onClick=${() => setAsking("delete")}>${t.albums.delete}<//>
		${asking === "delete" && html`<${Confirm} title=${t.albums.deleteTitle(printable(album.name))} text=${t.albums.deleteText} confirm=${t.albums.delete} onConfirm=${() => remove().catch(showError)} onClose=${close} />`}
		${
			asking === "rename" &&
			html`<${Dialog} title=${t.albums.rename} onClose=${close}>
				<form class="row gallery-form" onSubmit=${submits(() => during(rename()))}>
					<${Text} label=${t.album} value=${name} required maxlength="200" autofocus onChange=${setName} />
					<${Button} type="submit" kind="primary" busy=${busy} disabled=${!name.trim()}>${t.albums.rename}<//>
				</form>
			<//>`
		}`
}

/** Take images out of the album that is shown. @param {string[]} images */
export async function leaveAlbum(images) {
	const {album} = gallery.get().filters
	const answer = await api(`/v1/gallery/albums/${album}/images`, {json: {images, present: false}})
	toast(t.albums.removed(answer.images))
	clear()
	gallery.set(state => ({images: (state.images ?? []).filter(row => !images.includes(row.id))}))
	await load()
}
