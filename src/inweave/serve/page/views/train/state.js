// The open dataset: its images, captions with undo, uploads, planned crops, the form of the run.
import {api, createStore, folderOf, showError} from "../../kit.js"
import {t} from "./strings.js"

/** @type {OpenDataset} */
const EMPTY = {dataset: null, crops: null, undo: [], uploads: null, checked: null, checking: ""}
export const desk = createStore({...EMPTY, forms: /** @type {Record<string, Partial<RunForm>>} */ ({})})

/** The address of a dataset. @param {string} id */
export const path = id => `/v1/datasets/${id.split("/").map(encodeURIComponent).join("/")}`

/** @param {string} dataset @param {{ name: string, modified?: number }} image */
export const thumbnail = (dataset, image) =>
	`${path(dataset)}/pictures/${encodeURIComponent(image.name)}?thumbnail=true&v=${image.modified ?? 0}`

/** @param {string} id */
export async function openDataset(id) {
	const open = desk.get().dataset?.id === id
	if (!open) desk.set({...EMPTY, uploads: desk.get().uploads})
	const dataset = await api(path(id))
	desk.set(open ? {dataset} : {...EMPTY, uploads: desk.get().uploads, dataset})
}

/** @param {string} name */
export const createDataset = name => api("/v1/datasets", {json: {name}})

/** Change the form of a dataset. @param {string} id @param {Partial<RunForm>} patch */
export function changeForm(id, patch) {
	desk.set(({forms}) => ({forms: {...forms, [id]: {...forms[id], ...patch}}}))
}

/**
 * Store captions, and keep the previous ones for undo.
 * @param {Labels} captions @param {string} label of the undo button
 */
export async function saveCaptions(captions, label) {
	const {dataset} = desk.get()
	if (!dataset || !Object.keys(captions).length) return
	const {before} = await api(`${path(dataset.id)}/captions`, {method: "PATCH", json: {captions}})
	desk.set(({undo}) => ({undo: [...undo.slice(-49), {label, before}]}))
	show(captions)
}

export async function undoCaptions() {
	const {dataset, undo} = desk.get()
	const last = undo.at(-1)
	if (!dataset || !last) return
	await api(`${path(dataset.id)}/captions`, {method: "PATCH", json: {captions: last.before}})
	desk.set({undo: undo.slice(0, -1)})
	show(last.before)
}

/** @param {Labels} captions */
function show(captions) {
	desk.set(({dataset}) => ({
		dataset: dataset && {
			...dataset,
			pictures: dataset.pictures.map(each => (each.name in captions ? {...each, caption: captions[each.name]} : each))
		}
	}))
}

/** @param {string} name */
export async function removeImage(name) {
	const {dataset} = desk.get()
	if (!dataset) return
	await api(`${path(dataset.id)}/pictures/${encodeURIComponent(name)}`, {method: "DELETE"})
	const images = dataset.pictures.filter(each => each.name !== name)
	const undo = desk.get().undo.map(each => {
		const {[name]: _, ...before} = each.before
		return {...each, before}
	})
	desk.set({
		dataset: {...dataset, pictures: images},
		undo: undo.filter(each => Object.keys(each.before).length)
	})
}

const PARALLEL = 2

/** Upload images; text files of the same names are their captions. @param {string} id @param {File[]} files */
export async function addFiles(id, files) {
	/** @param {File} file */
	const isCaption = file => /\.(txt|caption)$/i.test(file.name)
	/** @param {File} file */
	const isImage = file => file.type.startsWith("image/") || /\.(png|jpe?g|webp|bmp)$/i.test(file.name)
	const images = files.filter(isImage)
	const others = files.filter(file => !isImage(file) && !isCaption(file))
	const taken = new Set(desk.get().dataset?.id === id ? desk.get().dataset?.pictures.map(each => stem(each.name)) : [])
	/** an image and its caption have the same name in the same folder @param {File} file */
	const place = file => `${folderOf(file)}/${stem(file.name)}`
	/** @type {Map<string, string>} the place of a file and the name of its image */
	const names = new Map([...taken].map(each => [`/${each}`, each]))
	const waiting = images.map(file => {
		const wanted = clean(stem(file.name))
		let name = wanted
		for (let number = 2; taken.has(name); number += 1) name = `${wanted}-${number}`
		taken.add(name)
		names.set(place(file), name)
		return {file, name}
	})
	const ignored = others.length ? [{name: others[0].name, message: t.ignored(others.length)}] : []
	desk.set({uploads: {total: images.length, done: 0, failures: ignored}})
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
				// the list names the file already
				count({name: file.name, message: error.message.replace(`image ${name}.png: `, "")})
				names.delete(place(file))
			}
		}
	}
	await Promise.all(Array.from({length: PARALLEL}, send))
	await openDataset(id)
	/** @type {Labels} */
	const captions = {}
	for (const file of files.filter(isCaption)) {
		const name = names.get(place(file))
		if (name) captions[`${name}.png`] = (await file.text()).trim()
		else count({name: file.name, message: t.noImage})
	}
	await saveCaptions(captions, t.captions.fromFiles).catch(showError)
	const {uploads} = desk.get()
	if (uploads && !uploads.failures.length) desk.set({uploads: null})
}

/** @param {string} name */
export const stem = name => name.replace(/\.[^.]*$/, "")

/** A name of letters, digits, spaces, dots, dashes and underscores, which the worker accepts. @param {string} name */
const clean = name =>
	name
		.replace(/[^\p{L}\p{N}_ .-]/gu, "-")
		.replace(/^[^\p{L}\p{N}_]+/u, "")
		.slice(0, 100)
		.replace(/[ .]+$/, "") || t.image
