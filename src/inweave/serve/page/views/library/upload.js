// Uploads to the library: sent one after the other, checked by the worker in a separate process.
import {api, app, Button, bytes, createStore, href, html, Icon, loadLoras, Thread, useStore} from "../../kit.js"
import {t} from "./strings.js"

const uploads = createStore({list: /** @type {Upload[]} */ ([])})
let next = 1
let queue = Promise.resolve()

/** @param {File[]} files */
export function addFiles(files) {
	for (const file of files) {
		const key = next++
		const upload = {key, name: file.name, size: file.size, state: /** @type {const} */ ("waiting")}
		uploads.set(({list}) => ({list: [...list, upload]}))
		queue = queue.then(() => send(key, file))
	}
}

/** @param {number} key @param {Partial<Upload>} patch */
const update = (key, patch) =>
	uploads.set(({list}) => ({list: list.map(each => (each.key === key ? {...each, ...patch} : each))}))

/** @param {number} key @param {File} file */
async function send(key, file) {
	const limit = app.get().capabilities?.limits.lora_bytes ?? Number.POSITIVE_INFINITY
	if (!/\.safetensors$/i.test(file.name)) return update(key, {state: "refused", reason: t.notSafetensors})
	if (file.size > limit) return update(key, {state: "refused", reason: t.tooLarge(bytes(limit))})
	update(key, {state: "sending"})
	try {
		const lora = await api("/v1/loras", {
			method: "POST",
			body: file,
			headers: {"Content-Type": "application/octet-stream"},
			query: {name: uploadName(file.name)}
		})
		update(key, {state: "added", id: lora.id, name: lora.display_name})
		await loadLoras()
	} catch (error) {
		update(key, {state: "refused", reason: error.message})
	}
}

/** A name that the worker accepts, close to the file's. @param {string} file */
const uploadName = file =>
	file
		.replace(/\.safetensors$/i, "")
		.normalize("NFC")
		.replace(/[^\p{L}\p{N}_ .()[\]-]+/gu, "-")
		.replace(/^[^\p{L}\p{N}]+|[ .]+$/gu, "")
		.slice(0, 60) || "lora"

export function Uploads() {
	const {list} = useStore(uploads)
	const busy = list.some(each => each.state === "waiting" || each.state === "sending")
	return html`<section class="library-uploads" aria-label=${t.uploads} aria-live="polite">
		${list.map(
			each => html`<div key=${each.key} class="card row library-upload">
				<${Icon} name=${{waiting: "upload", sending: "upload", added: "check", refused: "warning"}[each.state]} />
				<div class="grow">
					<p class="clip">${each.state === "added" ? html`<a href=${href("library", {lora: each.id})}>${each.name}</a>` : each.name} <span class="muted small">${bytes(each.size)}</span></p>
					${each.state === "sending" ? html`<${Thread} percent=${null} label=${t.sending} />` : html`<p class=${each.state === "refused" ? "field-error" : "muted small"}>${each.reason ?? t.states[each.state]}</p>`}
				</div>
			</div>`
		)}
		${list.length > 0 && !busy && html`<${Button} size="small" kind="quiet" onClick=${() => uploads.set({list: []})}>${t.clear}<//>`}
	</section>`
}
