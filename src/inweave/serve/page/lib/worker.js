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

/** Look for added and removed files, more often at first: the first scan takes a while. */
export async function checkLoras() {
	const {loras} = app.get()
	const now = performance.now()
	if (loras === null || now - checked < (loras.length && now > 60_000 ? 30_000 : 3000)) return
	checked = now
	const {total} = await api("/v1/loras", {query: {limit: 1}})
	if (total !== loras.length) await loadLoras()
}

/** Have the worker scan its folders now. */
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

/** A LoRA by its name, alias, path, id or hash. @param {Lora[] | null} loras @param {string} reference */
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

/** The named or the default model. @param {Capabilities | null} capabilities @param {string | null | undefined} name */
export function findModel(capabilities, name) {
	return capabilities?.models.find(model => (name ? model.name === name : model.default)) ?? null
}

/** The name to show for a reference to a LoRA, without invisible characters. @param {string} reference */
export const nameOf = reference => findLora(app.get().loras, reference)?.display_name ?? printable(reference)
