// The session: the token is sent once, then the browser holds a cookie that scripts cannot read.
import {api} from "./api.js"
import {pause} from "./sse.js"
import {app} from "./state.js"

/** Open the session; retries until the worker answers. */
export async function openSession() {
	for (let wait = 300; ; wait = Math.min(wait * 1.6, 4000)) {
		try {
			const {token_required} = await api("/v1/session")
			app.set({session: "open", tokenRequired: token_required})
			return
		} catch (error) {
			if (error.status === 401) return
			await pause(wait)
		}
	}
}

/** Exchange the token for the cookie; an ApiError with status 401 if it is wrong. @param {string} token */
export async function unlock(token) {
	// headers hold Latin-1; the bytes of the token travel in base64
	const bytes = Array.from(new TextEncoder().encode(`:${token}`), byte => String.fromCharCode(byte)).join("")
	await api("/v1/session", {method: "POST", headers: {Authorization: `Basic ${btoa(bytes)}`}})
	app.set({session: "open", tokenRequired: true})
}

export async function lock() {
	await api("/v1/session", {method: "DELETE"})
	app.set({session: "locked"})
}
