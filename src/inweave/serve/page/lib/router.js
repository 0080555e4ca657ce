// The view and its parameters are in the fragment of the address: it can be shared, and prompts stay out of server logs.
//
//   #/compare?lora=pixel&seed=7      { view: "compare", params: { lora: "pixel", seed: "7" } }
import {createStore, useStore} from "./store.js"

/** @returns {Route} */
function current() {
	const [path, query = ""] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s)
	return {view: decodeURIComponent(path) || "generate", params: Object.fromEntries(new URLSearchParams(query))}
}

export const route = createStore(current())
addEventListener("hashchange", () => route.set(current()))

/** The address of a view, for links. @param {string} view @param {Query} [params] empty ones are left out */
export function href(view, params = {}) {
	const query = new URLSearchParams()
	for (const [name, value] of Object.entries(params)) {
		if (value !== null && value !== undefined && value !== "") query.set(name, String(value))
	}
	const text = query.toString()
	return `#/${view}${text ? `?${text}` : ""}`
}

/** Go to a view: a new history entry. @param {string} view @param {Query} [params] */
export function navigate(view, params) {
	location.hash = href(view, params)
}

/** Update the address without a history entry and without rendering. @param {string} view @param {Query} params */
export function remember(view, params) {
	if (route.get().view !== view) return
	const address = href(view, params)
	if (location.hash !== address) history.replaceState(null, "", address)
}

/** The current address, which `remember` may have changed since the route was set. */
export const currentParams = () => current().params

export const useRoute = () => useStore(route)
