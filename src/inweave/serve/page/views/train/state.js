// A dataset that is open: its pictures, their captions with undo, uploads, the plan of crops, the form of the run.
import {api, createStore, folderOf, showError, texts} from "../../kit.js"

const t = texts.train
const EMPTY = {
	dataset: /** @type {Dataset | null} */ (null),
	crops: /** @type {Map<string, Crop> | null} */ (null),
	undo: /** @type {{ label: string, before: Record<string, string> }[]} */ ([]),
	uploads: /** @type {Uploads | null} */ (null),
	report: /** @type {any} */ (null), // the check of the form as it is
	checking: 0 // the number of the check that is made
}
/** What was checked says nothing of what has changed since, nor does a check that is still being made. */
const STALE = {report: null, checking: 0}
export const desk = createStore({...EMPTY, forms: /** @type {Record<string, Partial<RunForm>>} */ ({})})

/** @param {string} id a dataset's, in an address */
export const path = id => `/v1/datasets/${id.split("/").map(encodeURIComponent).join("/")}`

/** @param {{ name: string, modified?: number }} picture */
export const thumbnail = (dataset, picture) =>
	`${path(dataset)}/pictures/${encodeURIComponent(picture.name)}?thumbnail=true&v=${picture.modified ?? 0}`

export async function openDataset(id) {
	const open = desk.get().dataset?.id === id
	if (!open) desk.set({...EMPTY, uploads: desk.get().uploads})
	const dataset = await api(path(id))
	desk.set(open ? {dataset} : {...EMPTY, uploads: desk.get().uploads, dataset})
}

export const createDataset = name => api("/v1/datasets", {json: {name}})

/** Change the form of a dataset; what was checked before says nothing of it any more. @param {Partial<RunForm>} patch */
export function changeForm(id, patch) {
	desk.set(({forms}) => ({...STALE, forms: {...forms, [id]: {...forms[id], ...patch}}}))
}

/**
 * Store captions, remembering those they replace.
 * @param {Record<string, string>} captions
 * @param {string} label what was done, for the undo button
 */
export async function saveCaptions(captions, label) {
	const {dataset} = desk.get()
	if (!dataset || !Object.keys(captions).length) return
	const {before} = await api(`${path(dataset.id)}/captions`, {method: "PATCH", json: {captions}})
	desk.set(({undo}) => ({undo: [...undo.slice(-49), {label, before}], ...STALE}))
	show(captions)
}

export async function undoCaptions() {
	const {dataset, undo} = desk.get()
	const last = undo.at(-1)
	if (!dataset || !last) return
	await api(`${path(dataset.id)}/captions`, {method: "PATCH", json: {captions: last.before}})
	desk.set({undo: undo.slice(0, -1), ...STALE})
	show(last.before)
}

/** @param {Record<string, string>} captions */
function show(captions) {
	desk.set(({dataset}) => ({
		dataset: dataset && {
			...dataset,
			pictures: dataset.pictures.map(each => (each.name in captions ? {...each, caption: captions[each.name]} : each))
		}
	}))
}

export async function removePicture(name) {
	const {dataset} = desk.get()
	if (!dataset) return
	await api(`${path(dataset.id)}/pictures/${encodeURIComponent(name)}`, {method: "DELETE"})
	const pictures = dataset.pictures.filter(each => each.name !== name)
	const undo = desk.get().undo.map(each => {
		const {[name]: _, ...before} = each.before
		return {...each, before}
	})
	desk.set({
		dataset: {...dataset, pictures},
		...STALE,
		undo: undo.filter(each => Object.keys(each.before).length)
	})
}

const PARALLEL = 2

/** Send pictures one by one; text files beside them are their captions. */
export async function addFiles(id, files) {
	const isCaption = file => /\.(txt|caption)$/i.test(file.name)
	const isPicture = file => file.type.startsWith("image/") || /\.(png|jpe?g|webp|bmp)$/i.test(file.name)
	const pictures = files.filter(isPicture)
	const others = files.filter(file => !isPicture(file) && !isCaption(file))
	const taken = new Set(desk.get().dataset?.id === id ? desk.get().dataset?.pictures.map(each => stem(each.name)) : [])
	/** a picture and its caption have the same name in the same folder */
	const place = file => `${folderOf(file)}/${stem(file.name)}`
	/** @type {Map<string, string>} the place of a file and the name of the picture it became */
	const names = new Map([...taken].map(each => [`/${each}`, each]))
	const waiting = pictures.map(file => {
		const wanted = clean(stem(file.name))
		let name = wanted
		for (let number = 2; taken.has(name); number += 1) name = `${wanted}-${number}`
		taken.add(name)
		names.set(place(file), name)
		return {file, name}
	})
	const ignored = others.length ? [{name: others[0].name, message: t.ignored(others.length)}] : []
	desk.set({uploads: {total: pictures.length, done: 0, failures: ignored}, ...STALE})
	/** @param {{ name: string, message: string } | null} failure */
	const count = failure =>
		desk.set(({uploads}) => ({
			uploads: uploads && {
				...uploads,
				done: Math.min(uploads.done + 1, uploads.total),
				failures: failure ? [...uploads.failures, failure] : uploads.failures
			}
		}))
	const send = async () => {
		for (let next = waiting.shift(); next; next = waiting.shift()) {
			const {file, name} = next
			try {
				await api(`${path(id)}/pictures/${encodeURIComponent(name)}.png`, {method: "PUT", body: file})
				count(null)
			} catch (error) {
				count({name: file.name, message: error.message})
				names.delete(place(file))
			}
		}
	}
	await Promise.all(Array.from({length: PARALLEL}, send))
	await openDataset(id)
	/** @type {Record<string, string>} */
	const captions = {}
	for (const file of files.filter(isCaption)) {
		const name = names.get(place(file))
		if (name) captions[`${name}.png`] = (await file.text()).trim()
		else count({name: file.name, message: t.noPicture})
	}
	await saveCaptions(captions, t.captions.fromFiles).catch(showError)
	const {uploads} = desk.get()
	if (uploads && !uploads.failures.length) desk.set({uploads: null})
}

export const stem = name => name.replace(/\.[^.]*$/, "")

/** @param {string} name letters, digits, spaces, dots, dashes and underscores, as the worker stores them */
const clean = name =>
	name
		.replace(/[^\p{L}\p{N}_ .-]/gu, "-")
		.replace(/^[^\p{L}\p{N}_]+/u, "")
		.slice(0, 100)
		.replace(/[ .]+$/, "") || t.picture
