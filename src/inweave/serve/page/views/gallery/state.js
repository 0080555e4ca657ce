// The images that the view shows: pages of the worker's list, filters, the selection.
import {ApiError, api, createStore, currentParams} from "../../kit.js"

const PAGE = 80
/** @type {GalleryFilters} */
const NONE = {q: "", lora: "", model: "", album: "", starred: false, trashed: false}

export const gallery = createStore(
	/** @type {GalleryState} */ ({
		filters: read(),
		images: null,
		next: null,
		total: 0,
		facets: null,
		albums: [],
		selected: new Set(),
		anchor: null
	})
)

/** The filters of the address. @returns {GalleryFilters} */
export function read() {
	const {q = "", lora = "", model = "", album = "", starred, trashed} = currentParams()
	return {q, lora, model, album, starred: Boolean(starred), trashed: Boolean(trashed)}
}

/** Their parameters. @param {GalleryFilters} filters @returns {Labels} */
export const address = ({starred, trashed, ...texts}) => ({
	...texts,
	starred: starred ? "1" : "",
	trashed: trashed ? "1" : ""
})

/** @param {GalleryFilters} filters */
export const isFiltered = filters => JSON.stringify(filters) !== JSON.stringify(NONE)

/** @param {GalleryFilters} filters @returns {Record<string, any>} */
const queryOf = filters => Object.fromEntries(Object.entries(filters).filter(([, value]) => value))

let turn = 0
/** @type {Promise<void> | null} */
let loading = null

/** @param {Partial<GalleryFilters>} patch @returns {Promise<void>} */
export function filter(patch) {
	const filters = {...gallery.get().filters, ...patch}
	gallery.set({filters, images: null, next: null, selected: new Set(), anchor: null})
	return load()
}

export const showAll = () => filter(NONE)

/** The first page, and everything that was loaded after it. @returns {Promise<void>} */
export async function load() {
	const mine = ++turn
	const {filters} = gallery.get()
	try {
		const [{images, next, total}] = await Promise.all([
			api("/v1/gallery", {query: {...queryOf(filters), limit: PAGE}}),
			loadFacets()
		])
		if (mine !== turn) return
		const last = images.at(-1)?.created ?? 0
		const older = next === null ? [] : (gallery.get().images ?? []).filter(row => row.created < last)
		gallery.set(state => ({images: [...images, ...older], next: older.length ? state.next : next, total}))
	} catch (error) {
		if (mine !== turn) return
		gallery.set(state => ({images: state.images ?? []}))
		// an album that was deleted
		if (error instanceof ApiError && error.status === 404 && filters.album) return filter({album: ""})
		throw error
	}
}

/** The next page; one call at a time. @returns {Promise<void>} */
export function loadMore() {
	loading ??= readMore().finally(() => {
		loading = null
	})
	return loading
}

async function readMore() {
	const mine = turn
	const {filters, next} = gallery.get()
	if (next === null) return
	const answer = await api("/v1/gallery", {query: {...queryOf(filters), limit: PAGE, cursor: next}})
	if (mine !== turn || gallery.get().next !== next) return
	gallery.set(({images}) => ({images: [...(images ?? []), ...answer.images], next: answer.next}))
}

/** What can be filtered by, and the albums. */
export async function loadFacets() {
	const [facets, {albums}] = await Promise.all([api("/v1/gallery/facets"), api("/v1/gallery/albums")])
	gallery.set({facets, albums})
}

/** @param {string[]} ids @param {(row: GalleryRow) => GalleryRow | null} change null: it is not shown any more */
function changeRows(ids, change) {
	gallery.set(({images, total, selected}) => {
		const rows = (images ?? []).flatMap(row => (ids.includes(row.id) ? (change(row) ?? []) : [row]))
		const left = new Set([...selected].filter(id => rows.some(row => row.id === id)))
		return {images: rows, total: total - ((images?.length ?? 0) - rows.length), selected: left}
	})
}

/** Show them no longer. @param {string[]} ids */
export const drop = ids => changeRows(ids, () => null)

/** Show images again. @param {GalleryRow[]} rows */
export function put(rows) {
	gallery.set(({images, total}) => {
		const others = (images ?? []).filter(each => rows.every(row => row.id !== each.id))
		const all = [...others, ...rows].sort((a, b) => b.created - a.created)
		return {images: all, total: total + all.length - (images?.length ?? 0)}
	})
}

/** @param {string[]} ids @param {boolean} starred */
export async function star(ids, starred) {
	await api("/v1/gallery/star", {json: {images: ids, starred}})
	const hidden = gallery.get().filters.starred && !starred
	changeRows(ids, row => (hidden ? null : {...row, starred}))
	await loadFacets()
}

// the selection

/** @param {string} id @param {boolean} [range] everything between it and the one that was selected last */
export function toggle(id, range = false) {
	gallery.set(({images, selected, anchor}) => {
		const ids = (images ?? []).map(row => row.id)
		const [from, to] = [ids.indexOf(anchor ?? ""), ids.indexOf(id)]
		const next = new Set(selected)
		if (range && from >= 0) {
			for (const each of ids.slice(Math.min(from, to), Math.max(from, to) + 1)) next.add(each)
			return {selected: next}
		}
		if (!next.delete(id)) next.add(id)
		return {selected: next, anchor: id}
	})
}

export const selectAll = () => gallery.set(({images}) => ({selected: new Set(images?.map(row => row.id))}))
export const clear = () => gallery.set({selected: new Set(), anchor: null})

/** The selected images in the order of the list. */
export const selectedIds = () => {
	const {images, selected} = gallery.get()
	return (images ?? []).filter(row => selected.has(row.id)).map(row => row.id)
}
