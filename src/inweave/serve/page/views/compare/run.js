// The images of a table, each generated once: the same request gives the same image.
import {ApiError, app, cancelJob, createStore, findModel, forgetJob, submitJob, waitForJob} from "../../kit.js"

/** steps of a draft: enough for an impression */
const DRAFT = 4

export const cells = createStore({made: /** @type {Record<string, Cell>} */ ({}), left: 0})

/** @param {Fields} request */
export const cellKey = request => JSON.stringify(request)

let current = {jobs: /** @type {Set<string>} */ (new Set()), stopped: true}

/**
 * Generate the missing images, first row first; a newer run takes over.
 * @param {Sheet | null} sheet @param {boolean} drafts whether each is first generated with few steps
 */
export async function run(sheet, drafts) {
	if (!sheet) return
	stop()
	const mine = {jobs: new Set(), stopped: false}
	current = mine
	const missing = sheet.rows.flat().filter(request => !cells.get().made[cellKey(request)]?.image)
	const own = findModel(app.get().capabilities, missing[0]?.model)?.defaults?.steps ?? 20
	const early = drafts ? missing.filter(({steps = own}) => steps > 2 * DRAFT) : []
	const waiting = [
		...early.map(request => ({
			key: cellKey(request),
			draft: true,
			request: {...request, steps: DRAFT, gallery: false},
			id: ""
		})),
		...missing.map(request => ({key: cellKey(request), draft: false, request, id: ""}))
	]
	cells.set({left: missing.length})
	try {
		for (const each of waiting) {
			each.id = await submitJob(each.request)
			mine.jobs.add(each.id)
			if (mine.stopped) return
		}
		for (const {id, key, draft} of waiting) {
			const job = await waitForJob(id)
			mine.jobs.delete(id)
			if (mine.stopped) return
			const image = job.result?.images?.[0]
			if (draft) image && keep(key, {preview: image.url})
			else {
				keep(key, image ? {image} : {error: job.error?.message ?? job.state})
				cells.set(({left}) => ({left: left - 1}))
			}
		}
	} catch (error) {
		if (!mine.stopped || !(error instanceof ApiError)) throw error
	} finally {
		if (current === mine) stop()
		else cancel(mine.jobs)
		for (const {id, key, draft} of waiting) if (draft && id) drop(id, key).catch(() => {})
	}
}

/** Remove a draft once the image exists, or another one is generated. @param {string} id @param {string} key */
async function drop(id, key) {
	await waitForJob(id)
	if (cells.get().made[key]?.preview) keep(key, {})
	await forgetJob(id)
}

/** @param {string} key @param {Cell} cell */
const keep = (key, cell) => cells.set(({made}) => ({made: {...made, [key]: cell}}))

/** @param {Set<string>} jobs */
function cancel(jobs) {
	for (const id of jobs) cancelJob(id).catch(() => {}) // it has ended, or the worker is gone
	jobs.clear()
}

/** Cancel the jobs that are not done. */
export function stop() {
	cancel(current.jobs)
	current.stopped = true
	cells.set({left: 0})
}
