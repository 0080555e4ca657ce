// Short messages. Errors stay until they are dismissed or another view is opened.
import {ApiError} from "../lib/api.js"
import {html} from "../lib/dom.js"
import {app} from "../lib/state.js"
import {createStore, useStore} from "../lib/store.js"
import {texts} from "../strings.js"
import {Button} from "./button.js"
import {Icon} from "./icons.js"

const toasts = createStore({list: /** @type {Message[]} */ ([])})
let next = 1

/** Show a message; returns a function that ends it. @param {string} text @param {Partial<Omit<Message, "id" | "text">>} [options] */
export function toast(text, options = {}) {
	const id = next++
	const message = {id, kind: /** @type {Message["kind"]} */ ("info"), text, ...options}
	toasts.set(({list}) => ({list: [...list.filter(each => each.text !== text).slice(-3), message]}))
	if (message.kind === "info") setTimeout(() => dismiss(id), message.action ? 8000 : 4000)
	return () => dismiss(id)
}

// messages end with their causes
app.subscribe(() => {
	for (const {id, until} of toasts.get().list) if (until?.(app.get())) dismiss(id)
})

/** Show an error, for `catch(showError)`. @param {any} error @returns {void | (() => void)} */
export function showError(error) {
	if (error instanceof ApiError) {
		if (error.status === 401) return // the page asks for the token
		const details = error.problems.length > 1 ? error.problems : []
		const until = error.status === 0 ? (/** @type {AppState} */ {online}) => online : undefined
		return toast(error.message, {kind: "error", details, until})
	} else if (error?.name !== "AbortError") {
		console.error(error)
		return toast(texts.errors.bug, {kind: "error", details: [String(error?.message ?? error)]})
	}
}

/** @param {number} id */
const dismiss = id => toasts.set(({list}) => ({list: list.filter(each => each.id !== id)}))

export const clearErrors = () => toasts.set(({list}) => ({list: list.filter(each => each.kind === "info")}))

export function Toasts() {
	const {list} = useStore(toasts)
	return html`<div class="toasts" role="status" aria-live="polite">
		${list.map(
			each => html`<div key=${each.id} class=${`toast toast-${each.kind}`}>
				<${Icon} name=${each.kind === "info" ? "check" : "warning"} />
				<div class="grow">
					<p>${each.text}</p>
					${each.details?.length ? html`<ul>${each.details.map(line => html`<li>${line}</li>`)}</ul>` : null}
				</div>
				${
					each.action &&
					html`<${Button} size="small" onClick=${() => {
						dismiss(each.id)
						each.action?.run()
					}}>${each.action.label}<//>`
				}
				<${Button} kind="quiet" size="small" icon="close" label=${texts.actions.dismiss} onClick=${() => dismiss(each.id)} />
			</div>`
		)}
	</div>`
}
