// Jobs: submit, watch, cancel, reorder. The list is polled and running jobs are followed by their event streams, so that all
// tabs show the same, also after a reload or a restart of the worker.

import {texts} from "../strings.js"
import {api, randomId} from "./api.js"
import {followStream, pause} from "./sse.js"
import {app} from "./state.js"
import {checkLoras, loadLoras, loadReadiness} from "./worker.js"

export const FINAL = new Set(["done", "failed", "cancelled"])
/** CSS classes by state. @type {Labels} */
export const BADGES = {done: "badge-good", failed: "badge-bad", running: "badge-active"}
const PAGE = 60
// browsers allow six connections per host, for all tabs
const MAX_STREAMS = 2

const channel = "BroadcastChannel" in window ? new BroadcastChannel("inweave") : null
channel?.addEventListener("message", () => refreshJobs())

/** @type {(() => void) | null} */
let wake = null
let again = false // refresh without a pause

/** Keep the lists up to date for as long as the page is open; hidden pages rest. */
export async function watchJobs() {
	document.addEventListener("visibilitychange", () => {
		if (document.hidden) stopStreams()
		refreshJobs()
	})
	addEventListener("online", refreshJobs)
	while (true) {
		if (!document.hidden && app.get().session === "open") {
			await refresh()
				.then(checkLoras)
				.catch(() => {})
		}
		const {active, online, notReady} = app.get()
		const busy = (active?.length ?? 0) > 0 || !online || notReady !== null
		const woken = Promise.withResolvers()
		wake = () => woken.resolve(null)
		if (!again) await Promise.race([pause(busy ? 1200 : 4000), woken.promise])
		again = false
	}
}

/** Refresh now. */
export function refreshJobs() {
	again = true
	wake?.()
}

async function refresh() {
	const wasOnline = app.get().online
	const before = new Set(app.get().active?.map(job => job.id))
	const {jobs, paused} = await api("/v1/jobs", {query: {state: ["queued", "running"], limit: 200}})
	/** @param {Job} job */
	const place = job => (job.state === "running" ? -1 : (job.position ?? 0))
	const active = /** @type {Job[]} */ (jobs).sort((a, b) => place(a) - place(b) || a.created - b.created)
	app.set({active, paused})
	if (!wasOnline || app.get().notReady !== null) await loadReadiness()
	const running = active.filter(job => job.state === "running")
	for (const job of running.slice(0, MAX_STREAMS)) keepProgress(job)
	const now = new Set(active.map(job => job.id))
	if (app.get().ended === null || !wasOnline || [...before].some(id => !now.has(id))) await refreshEnded()
}

const ENDED = {state: [...FINAL], limit: PAGE}

/** The newest jobs that ended. */
async function refreshEnded() {
	const {jobs, next} = await api("/v1/jobs", {query: ENDED})
	const older = (app.get().ended ?? []).slice(PAGE)
	app.set({ended: joined(jobs, older), endedNext: older.length ? app.get().endedNext : next})
}

/** The next page of ended jobs. */
export async function loadOlder() {
	const {endedNext, ended} = app.get()
	if (endedNext === null) return
	const {jobs, next} = await api("/v1/jobs", {query: {...ENDED, before: endedNext}})
	app.set({ended: joined(ended ?? [], jobs), endedNext: next})
}

/** @param {Job[]} first @param {Job[]} then those of them that are not in the first */
const joined = (first, then) => [...first, ...then.filter(job => !first.some(each => each.id === job.id))]

/**
 * Queue a job, once however often the request is repeated. Returns its id.
 * @param {ImageRequest | Fields} request @returns {Promise<string>}
 */
export async function submitJob(request) {
	const key = randomId()
	for (let attempt = 0; ; attempt += 1) {
		try {
			const {id} = await api("/v1/jobs", {json: request, headers: {"Idempotency-Key": key}})
			changed()
			return id
		} catch (error) {
			if (error.status !== 0 || attempt >= 4) throw error
			await pause(500 * 2 ** attempt)
		}
	}
}

/** The job once it has ended. @param {string} id @returns {Promise<Job>} */
export const waitForJob = id =>
	new Promise((resolve, reject) => {
		/** @param {JobEvent} event */
		const onEvent = event => FINAL.has(event.type) && api(`/v1/jobs/${id}`).then(resolve, reject)
		followJob(id, onEvent, reject)
	})

/** @param {string} id */
export async function cancelJob(id) {
	try {
		await api(`/v1/jobs/${id}`, {method: "DELETE"})
	} catch (error) {
		if (error.status !== 409) throw error // it has ended in the meantime
	}
	changed()
}

/** Remove a job that ended, with its images. @param {string} id */
export async function forgetJob(id) {
	await api(`/v1/jobs/${id}`, {method: "DELETE", query: {forget: true}})
	app.set(state => ({ended: state.ended?.filter(job => job.id !== id) ?? null}))
	changed()
}

/** Remove one image; the job goes with its last one. @param {string} id @param {string} file */
export async function deleteImage(id, file) {
	await api(`/v1/jobs/${id}/files/${encodeURIComponent(file)}`, {method: "DELETE"})
	app.set(state => ({
		ended:
			state.ended?.flatMap(job => {
				if (job.id !== id || !job.result) return [job]
				const images = job.result.images.filter(image => image.file !== file)
				return images.length ? [{...job, result: {...job.result, images}}] : []
			}) ?? null
	}))
	changed()
}

/** @param {string} id */
export async function retryJob(id) {
	const answer = await api(`/v1/jobs/${id}/retry`, {method: "POST"})
	changed()
	return answer.id
}

/** Move a waiting job; 0 runs next. @param {string} id @param {number} position */
export async function moveJob(id, position) {
	await api(`/v1/jobs/${id}`, {method: "PATCH", json: {position}})
	changed()
}

/** @param {boolean} paused */
export async function pauseQueue(paused) {
	await api("/v1/queue", {json: {paused}})
	app.set({paused})
	changed()
}

/** @param {Job} job @param {Progress} [progress] */
export function statusOf(job, progress) {
	const {queued, step, phases} = texts.generate
	if (job.state === "queued") return queued(job.position ?? 0)
	if (job.cancel_requested) return texts.generate.cancelling
	return progress?.total ? step(progress.step, progress.total) : phases[progress?.phase ?? "started"]
}

function changed() {
	refreshJobs()
	channel?.postMessage("changed")
}

// streams: one connection per job, however many components read it

/** @type {Map<string, JobStream>} */
const streams = new Map()

/**
 * Call `listener` with every event of a job, past and future. Returns a function that stops it.
 * @param {string} id @param {(event: JobEvent) => void} listener
 * @param {(error: any) => void} [onFailure] the job is unknown or has expired
 */
export function followJob(id, listener, onFailure) {
	let stream = streams.get(id)
	if (!stream) {
		stream = {events: [], listeners: new Set(), failures: new Set(), stop: new AbortController()}
		streams.set(id, stream)
		run(id, stream)
	}
	const joined = stream
	if (onFailure) joined.failures.add(onFailure)
	for (const event of joined.events) listener(event)
	joined.listeners.add(listener)
	return () => {
		joined.listeners.delete(listener)
		if (onFailure) joined.failures.delete(onFailure)
		if (!joined.listeners.size && streams.get(id) === joined) {
			joined.stop.abort()
			streams.delete(id)
		}
	}
}

/** @param {string} id @param {JobStream} stream */
async function run(id, stream) {
	try {
		await followStream(`/v1/jobs/${id}/events`, {
			signal: stream.stop.signal,
			isFinal: event => FINAL.has(event.event),
			onEvent(message) {
				const event = JSON.parse(message.data)
				// a reader that joins later needs the newest preview only
				if (event.type === "preview") stream.events = stream.events.filter(each => each.type !== "preview")
				stream.events.push(event)
				for (const listener of [...stream.listeners]) listener(event)
			}
		})
	} catch (error) {
		for (const failure of [...stream.failures]) failure(error)
	}
	if (streams.get(id) === stream) streams.delete(id)
}

/** @type {Map<string, () => void>} */
const watched = new Map()

/** Keep the progress of a running job in the state, until it ends. @param {Job} job */
function keepProgress(job) {
	if (watched.has(job.id)) return
	const done = () => {
		watched.get(job.id)?.()
		watched.delete(job.id)
		app.set(state => {
			const {[job.id]: _, ...progress} = state.progress
			return {progress}
		})
		refreshJobs()
	}
	const stop = followJob(
		job.id,
		event => {
			if (FINAL.has(event.type)) {
				if (event.type === "done" && job.operation === "train") loadLoras().catch(() => {})
				queueMicrotask(done)
			} else app.set(state => ({progress: {...state.progress, [job.id]: advance(state.progress[job.id], event)}}))
		},
		done
	)
	watched.set(job.id, stop)
}

function stopStreams() {
	for (const stop of watched.values()) stop()
	watched.clear()
}

/** @param {Progress | undefined} before @param {JobEvent} event @returns {Progress} */
export function advance(before, event) {
	const at = before ?? {step: 0, total: 0, percent: 0, eta: null, preview: null, phase: "queued"}
	if (event.type === "progress" || event.type === "preview") {
		return {
			step: event.step ?? at.step,
			total: event.total ?? at.total,
			percent: event.percent ?? at.percent,
			eta: event.eta ?? at.eta,
			preview: event.type === "preview" && event.image ? `data:image/png;base64,${event.image}` : at.preview,
			phase: "running"
		}
	}
	if (event.type === "started" || event.type === "retried") {
		return {step: 0, total: 0, percent: 0, eta: null, preview: null, phase: event.type}
	}
	return ["loading", "preparing"].includes(event.type) ? {...at, phase: event.type} : at
}
