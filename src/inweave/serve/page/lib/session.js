// Whether we may call the worker. The token is sent once; afterwards the browser holds a cookie that pages cannot read.
import {api} from "./api.js"
import {app} from "./state.js"

/** Ask whether we may call; tries again until the worker answers. */
export async function openSession() {
	for (let wait = 300; ; wait = Math.min(wait * 1.6, 4000)) {
		try {
			const {token_required} = await api("/v1/session")
			app.set({session: "open", tokenRequired: token_required})
			return
		} catch (error) {
			if (error.status === 401) return
			await new Promise(resolve => setTimeout(resolve, wait))
		}
	}
}

/** Exchange the token for the cookie; an ApiError with status 401 where it is wrong. */
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
