// What the worker can do and which LoRAs it has.
import {api} from "./api.js"
import {printable} from "./format.js"
import {app} from "./state.js"

export async function loadCapabilities() {
	app.set({capabilities: await api("/v1/capabilities")})
}

export async function loadLoras() {
	const {loras} = await api("/v1/loras", {query: {limit: 10000}})
	app.set({loras})
}

let checked = 0

/** Whether files came or went, asked often while the page is new or the library empty: the first scan takes its time. */
export async function checkLoras() {
	const {loras} = app.get()
	const now = performance.now()
	if (loras === null || now - checked < (loras.length && now > 60_000 ? 30_000 : 3000)) return
	checked = now
	const {total} = await api("/v1/loras", {query: {limit: 1}})
	if (total !== loras.length) await loadLoras()
}

/** Have the worker look at its folders now. */
export async function rescan() {
	await api("/v1/loras/refresh", {method: "POST"})
	await loadLoras()
}

/** Why a job would not run now; null once it would. */
export async function loadReadiness() {
	const response = await fetch("/ready", {headers: {"X-Requested-With": "inweave"}})
	const {ready, reason} = await response.json()
	app.set({notReady: ready ? null : (reason ?? "")})
}

/** The LoRA that a prompt or a picture names: by name, alias, path, id or hash. @param {Lora[] | null} loras */
export function findLora(loras, reference) {
	if (!loras) return undefined
	const file = reference.replace(/\.safetensors$/, "")
	const digits = reference.toLowerCase()
	return (
		loras.find(lora => lora.id === reference || lora.path === reference || lora.path === `${reference}.safetensors`) ??
		loras.find(lora => lora.name === file) ??
		loras.find(lora => lora.alias === reference) ??
		loras.find(lora => lora.hashes && Object.values(lora.hashes).includes(digits))
	)
}

/** The model of a name, or the worker's own. @param {Capabilities | null} capabilities @param {string | null | undefined} name */
export function findModel(capabilities, name) {
	return capabilities?.models.find(model => (name ? model.name === name : model.default)) ?? null
}

/** What people see of a reference to a LoRA: the name that the library shows, with nothing invisible in it. */
export const nameOf = reference => findLora(app.get().loras, reference)?.display_name ?? printable(reference)
