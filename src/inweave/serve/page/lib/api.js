// Calls to the worker's public API. Every failure is an ApiError with a sentence for people.
import {texts} from "../strings.js"
import {app} from "./state.js"

export class ApiError extends Error {
	/** @param {number} status 0: the worker could not be reached @param {string} message @param {string[]} [problems] */
	constructor(status, message, problems = []) {
		super(message)
		this.status = status
		this.problems = problems
	}
}

/** The response of a call that succeeded. @param {string} path @param {CallOptions} [options] */
export async function call(path, options = {}) {
	const headers = new Headers({"X-Requested-With": "inweave", ...options.headers})
	let body = options.body
	if (options.json !== undefined) {
		headers.set("Content-Type", "application/json")
		body = JSON.stringify(options.json)
	}
	let response
	try {
		response = await fetch(address(path, options.query), {
			method: options.method ?? (body === undefined ? "GET" : "POST"),
			headers,
			body,
			signal: options.signal,
			credentials: "same-origin"
		})
	} catch (error) {
		if (options.signal?.aborted) throw error
		setOnline(false)
		throw new ApiError(0, texts.errors.offline)
	}
	setOnline(true)
	if (response.ok) return response
	const failure = await failureOf(response)
	if (failure.status === 401 && app.get().session !== "locked") app.set({session: "locked", tokenRequired: true})
	throw failure
}

/** The JSON of a call that succeeded. @param {string} path @param {CallOptions} [options] @returns {Promise<any>} */
export async function api(path, options) {
	return (await call(path, options)).json()
}

/** A path with its query, also for images and links. @param {string} path @param {CallOptions["query"]} [query] */
export function address(path, query = {}) {
	const fields = new URLSearchParams()
	for (const [name, value] of Object.entries(query)) {
		if (Array.isArray(value)) for (const each of value) fields.append(name, each)
		else if (value !== null && value !== undefined) fields.set(name, String(value))
	}
	const text = fields.toString()
	return text ? `${path}?${text}` : path
}

/** `crypto.randomUUID` is missing on plain http. */
export const randomId = () =>
	Array.from(crypto.getRandomValues(new Uint8Array(16)), byte => byte.toString(16).padStart(2, "0")).join("")

/** @param {boolean} online */
function setOnline(online) {
	if (app.get().online !== online) app.set({online})
}

/** @param {Response} response */
async function failureOf(response) {
	/** @type {any} */
	let error = {}
	try {
		const body = await response.json()
		error = typeof body.error === "object" ? body.error : {message: body.detail}
	} catch {
		// not JSON: a proxy in between
	}
	return new ApiError(response.status, error.message ?? texts.errors.http(response.status), error.problems)
}
