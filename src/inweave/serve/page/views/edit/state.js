// The image being edited, its mask, zoom and jobs. It survives changes of view.
import {ApiError, api, app, call, cancelJob, createStore, texts, toast, toBase64, toPng} from "../../kit.js"
import {createDraft, submitDraft} from "../generate/draft.js"
import {settingsOf} from "../generate/metadata.js"
import {metadataOf, promptOf} from "../generate/stage.js"
import {createCanvas, Mask} from "./mask.js"
import {t} from "./strings.js"

/** @type {EditState} */
const EMPTY = {
	source: null,
	mask: null,
	version: 0,
	from: {},
	tool: "brush",
	size: 24,
	hidden: false,
	camera: null,
	box: {width: 0, height: 0},
	jobs: [],
	opened: null,
	shown: "image"
}
export const edit = createStore(EMPTY)
export const draft = createDraft("edit", {strength: 0.75, feather: 8}, () => edit.get().from)

/** The pixels of a file, scaled down to the worker's limit. @param {Blob} blob @param {string} name */
async function decode(blob, name) {
	let bitmap
	try {
		bitmap = await createImageBitmap(blob)
	} catch {
		throw new ApiError(415, t.unreadable(name))
	}
	const limit = app.get().capabilities?.limits.image_pixels ?? 16_777_216
	const share = Math.sqrt(limit / (bitmap.width * bitmap.height))
	if (share >= 1) return bitmap
	const [resizeWidth, resizeHeight] = [bitmap.width, bitmap.height].map(side => Math.max(1, Math.floor(side * share)))
	toast(t.scaled(`${bitmap.width} × ${bitmap.height}`, `${resizeWidth} × ${resizeHeight}`), {kind: "warning"})
	return createImageBitmap(bitmap, {resizeWidth, resizeHeight, resizeQuality: "high"})
}

/** @param {ImageBitmap} bitmap @returns {Promise<EditSource>} */
async function sourceOf(bitmap) {
	const {width, height} = bitmap
	const context = createCanvas(width, height)
	context.drawImage(bitmap, 0, 0)
	const {data} = context.getImageData(0, 0, width, height)
	let transparent = false
	for (let at = 3; at < data.length && !transparent; at += 4) transparent = data[at] < 255
	context.globalCompositeOperation = "destination-over" // white below it, as the worker does
	context.fillStyle = "white"
	context.fillRect(0, 0, width, height)
	const blob = await toPng(context.canvas)
	const url = URL.createObjectURL(blob)
	return {canvas: context.canvas, holes: transparent ? bitmap : null, blob, url, upload: null, width, height}
}

/** The upload id of an image; it is sent once. @param {EditSource} source */
function uploadOf(source) {
	source.upload ??= api("/v1/uploads", {method: "POST", body: source.blob}).then(
		({id}) => id,
		error => {
			source.upload = null
			throw error
		}
	)
	return source.upload
}

/**
 * Edit an image. The previous one can be restored if it was painted on or edited.
 * @param {Blob} blob @param {string} name for messages @param {Partial<EditState>} [more]
 */
export async function openImage(blob, name, more = {}) {
	const source = await sourceOf(await decode(blob, name))
	const before = edit.get()
	const mask = new Mask(source.width, source.height, () => edit.set(({version}) => ({version: version + 1})))
	const size = Math.max(2, Math.round(Math.max(source.width, source.height) / 12))
	/** @param {EditState} state */
	const put = state => {
		edit.set({...state, box: edit.get().box})
		draft.remember()
	}
	put({...EMPTY, tool: before.tool, source, mask, size, ...more})
	if (before.mask?.undos.length || before.jobs.length)
		toast(t.replaced, {action: {label: texts.actions.undo, run: () => put(before)}})
	else if (before.source) URL.revokeObjectURL(before.source.url)
	return source
}

/** Edit a file; the address names it once it is uploaded. @param {File} file */
export async function openFile(file) {
	const source = await openImage(file, file.name)
	const upload = await uploadOf(source)
	if (edit.get().source !== source || edit.get().from.edit) return
	edit.set({from: {upload}})
	draft.remember()
}

/** @param {string} address */
const download = async address => (await call(address)).blob()

/**
 * Open what the address names: `job` and `image`, a generated image; `gallery`, one of the gallery; `upload`, an uploaded one; `edit`, an edit with its
 * source and mask.
 * @param {Labels} params
 */
export async function openAddress({job, image = "0", upload, gallery, edit: made, prompt}) {
	const id = made ?? job
	/** @type {Labels} */
	const from = made ? {edit: made} : job ? {job, image} : gallery ? {gallery} : {upload}
	if (!id && !upload && !gallery) return draft.remember()
	if (JSON.stringify(from) === JSON.stringify(edit.get().from)) return
	if (!id && gallery) {
		await openImage(await download(`/v1/gallery/${encodeURIComponent(gallery)}/file`), gallery, {from})
		// one that was made elsewhere may hold no settings
		if (prompt === undefined)
			await metadataOf(gallery).then(
				stored => take(settingsOf(stored)),
				() => {}
			)
		return
	}
	if (!id) {
		await openImage(await download(`/v1/uploads/${encodeURIComponent(upload)}/file`), upload, {from})
		return
	}
	const path = `/v1/jobs/${encodeURIComponent(id)}`
	/** @type {Job} */
	const opened = await api(path)
	if (made) {
		const files = `${path}/files/input-`
		await openImage(await download(`${files}init.png`), id, {from, jobs: [id], opened, shown: "result"})
		if (opened.operation === "image_inpaint")
			edit.get().mask?.takeWhite(await createImageBitmap(await download(`${files}mask.png`)))
		// what a job leaves out is the worker's own: 8 pixels
		if (prompt === undefined) draft.take({feather: 8, ...promptOf({job: opened, image: opened})})
		return
	}
	const images = opened.result?.images ?? []
	const found = images.find(each => String(each.index) === image) ?? images[0]
	if (!found) throw new ApiError(415, t.noImage)
	await openImage(await download(found.url), id, {from})
	if (prompt === undefined) take(promptOf({job: opened, image: found}))
}

/** What made an image larger or a sheet is not done to it again. */
const PLAIN = {upscale: undefined, outpaint: undefined, grid: undefined}

/** Take the settings of an image that will be edited. @param {Fields} settings */
function take(settings) {
	const {strength, feather} = draft.get()
	draft.take({...settings, ...PLAIN, seed: undefined, width: undefined, height: undefined, strength, feather})
}

/** Queue a job with the image, its mask if there is one, and the form. */
export async function submit() {
	const {source, mask} = edit.get()
	if (!source || !mask) throw new ApiError(415, t.choose)
	mask.commit()
	const more = mask.painted
		? {operation: "image_inpaint", mask_image: await toBase64(await mask.toBlob())}
		: {operation: "image_transform", feather: undefined}
	const send = async () => submitDraft(draft, {...more, image: await uploadOf(source)})
	const job = await send().catch(error => {
		if (error.status !== 410 || !source.upload) throw error
		source.upload = null // the worker kept it for a while
		return send()
	})
	if (edit.get().source !== source) return
	edit.set(({jobs}) => ({jobs: [job, ...jobs], from: {edit: job}, shown: "result", opened: null}))
	draft.remember()
}

/** Cancel its running and waiting jobs. */
export async function cancel() {
	const {jobs} = edit.get()
	await Promise.all((app.get().active ?? []).filter(job => jobs.includes(job.id)).map(job => cancelJob(job.id)))
}

// `zoom` is window pixels per image pixel

/** @param {EditState} state */
export function placeOf({source, camera, box}) {
	const {width, height} = source ?? {width: 1, height: 1}
	const fit = Math.max(0.01, Math.min((box.width - 24) / width, (box.height - 24) / height))
	const {zoom, x, y} = camera ?? {zoom: fit, x: width / 2, y: height / 2}
	return {fit, zoom, left: box.width / 2 - x * zoom, top: box.height / 2 - y * zoom}
}

/** Move the camera; its center stays in the image. @param {number} zoom @param {number} x @param {number} y */
function look(zoom, x, y) {
	const {width, height} = edit.get().source ?? {width: 0, height: 0}
	edit.set({camera: {zoom, x: Math.min(width, Math.max(0, x)), y: Math.min(height, Math.max(0, y))}})
}

/** Returns whether the zoom changed. @param {number} factor @param {Point} [at] the fixed point; default: the middle */
export function zoomBy(factor, at) {
	const state = edit.get()
	const {fit, zoom, left, top} = placeOf(state)
	const {width, height} = state.box
	const next = Math.min(Math.max(32, fit), Math.max(Math.min(fit, 1), zoom * factor))
	if (!state.source || next === zoom) return false
	const {x, y} = at ?? {x: width / 2, y: height / 2}
	look(next, (x - left) / zoom + (width / 2 - x) / next, (y - top) / zoom + (height / 2 - y) / next)
	return true
}

/** @param {number} dx @param {number} dy in window pixels */
export function panBy(dx, dy) {
	const state = edit.get()
	const {zoom, left, top} = placeOf(state)
	look(zoom, (state.box.width / 2 - left - dx) / zoom, (state.box.height / 2 - top - dy) / zoom)
}
