// Server-sent events over fetch, which unlike EventSource shows the status of a refusal and where to resume.
import {ApiError, call} from "./api.js"

/** The events in a body, as they come. @param {ReadableStream<Uint8Array>} body @returns {AsyncGenerator<ServerEvent>} */
export async function* parseEvents(body) {
	const decoder = new TextDecoder()
	const reader = body.getReader()
	let rest = ""
	let fields = {id: "", event: "message", data: /** @type {string[]} */ ([])}
	try {
		while (true) {
			const {done, value} = await reader.read()
			if (done) return
			const lines = (rest + decoder.decode(value, {stream: true})).split(/\r\n|\n|\r(?!$)/)
			rest = lines.pop() ?? ""
			for (const line of lines) {
				if (line === "") {
					if (fields.data.length) yield {id: fields.id, event: fields.event, data: fields.data.join("\n")}
					fields = {id: fields.id, event: "message", data: []}
					continue
				}
				const colon = line.indexOf(":")
				if (colon === 0) continue // a comment keeps the connection alive
				const name = colon < 0 ? line : line.slice(0, colon)
				const text = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "")
				if (name === "data") fields.data.push(text)
				else if (name === "id") fields.id = text
				else if (name === "event") fields.event = text
			}
		}
	} finally {
		reader.cancel().catch(() => {})
	}
}

/**
 * Everything an address streams, reconnecting as needed; ends with `isFinal`, an abort, or a permanent refusal (a job that
 * is unknown or has expired).
 * @param {string} path @param {FollowStreamOptions} options
 */
export async function followStream(path, {onEvent, isFinal, signal}) {
	let last = ""
	let failures = 0
	while (!signal.aborted) {
		try {
			const headers = {Accept: "text/event-stream", ...(last ? {"Last-Event-ID": last} : {})}
			const response = await call(path, {headers: headers, signal})
			if (!response.body) return
			for await (const event of parseEvents(response.body)) {
				failures = 0
				if (event.id) last = event.id
				onEvent(event)
				if (isFinal(event)) return
			}
			if (last)
				failures += 0.5 // closed by the worker: it stops, or the job has ended
			else return
		} catch (error) {
			if (signal.aborted) return
			if (error instanceof ApiError && error.status >= 400 && error.status < 500 && error.status !== 429) throw error
			failures += 1
		}
		await pause(Math.min(5000, 300 * 1.7 ** failures), signal)
	}
}

/** @param {number} milliseconds @param {AbortSignal} [signal] @returns {Promise<void>} */
export const pause = (milliseconds, signal) =>
	new Promise(resolve => {
		const timer = setTimeout(resolve, milliseconds)
		signal?.addEventListener(
			"abort",
			() => {
				clearTimeout(timer)
				resolve()
			},
			{once: true}
		)
	})
