// A form becomes a table of requests that differ only in the settings of their row and column.
import {nameOf, parseTags, texts, withoutTags, strength as written} from "../../kit.js"

const t = texts.compare
const MODES = ["without", "sweep", "pairs", "seeds"]
const NUMBERS = ["guidance", "width", "height", "clip_skip"]
const TEXTS = ["negative_prompt", "sampler", "schedule", "model"]

/** @param {Labels} params @returns {CompareForm} */
export function formOf(params) {
	/** @param {string} name */
	const number = name => (Number.isFinite(Number(params[name] || "x")) ? Number(params[name]) : undefined)
	/** @type {Fields} */
	const more = {}
	for (const name of NUMBERS) if (number(name) !== undefined) more[name] = number(name)
	for (const name of TEXTS) if (params[name]) more[name] = params[name]
	let loras = []
	try {
		loras = JSON.parse(params.loras ?? "[]").filter(
			(/** @type {any} */ each) => typeof each?.name === "string" && Number.isFinite(each.strength)
		)
	} catch {
		// an address that was cut off
	}
	return extractTags({
		mode: MODES.includes(params.mode) ? params.mode : "without",
		prompt: params.prompt ?? t.example,
		seed: number("seed") ?? 7,
		steps: number("steps"),
		count: Math.max(2, Math.min(8, number("count") ?? 4)),
		loras,
		more
	})
}

/** @param {CompareForm} form */
export const formAddress = ({mode, prompt, seed, steps, count, loras, more}) => ({
	mode: mode === "without" ? "" : mode,
	prompt,
	seed,
	steps,
	count: count === 4 ? "" : count,
	loras: loras.length ? JSON.stringify(loras) : "",
	...more
})

/** The settings of an image, with the LoRAs applied to it. @param {Job} job @param {number} index @returns {CompareForm} */
export function formOfJob(job, index) {
	const image = job.result?.images?.[index]
	/** @type {Fields} */
	const settings = {...job.settings, ...image?.settings}
	/** @param {string} name */
	const isSet = name => settings[name] !== undefined && settings[name] !== null
	const more = Object.fromEntries([...NUMBERS, ...TEXTS].filter(isSet).map(name => [name, settings[name]]))
	return {
		mode: "without",
		prompt: withoutTags(settings.prompt ?? ""),
		seed: image?.seed ?? settings.seed ?? 7,
		steps: settings.steps,
		count: 4,
		loras: (job.result?.loras ?? []).map(choice),
		more: {...more, model: job.model}
	}
}

/** @param {{ name: string, te: number, unet: number }} lora @returns {Choice} */
const choice = ({name, te, unet}) => ({name, strength: unet, ...(te === unet ? {} : {te, unet})})

/** Tags in the prompt become choices, so that an image without LoRAs has none. @param {CompareForm} form */
export function extractTags(form) {
	const tags = parseTags(form.prompt).map(choice)
	if (!tags.length) return form
	const others = form.loras.filter(each => !tags.some(tag => tag.name === each.name))
	return {...form, prompt: withoutTags(form.prompt), loras: [...others, ...tags]}
}

/** @param {CompareForm} form @param {Choice[]} loras */
const request = ({prompt, steps, more, seed: own}, loras, seed = own) => ({
	...more,
	prompt,
	seed,
	...(steps === undefined ? {} : {steps}),
	loras: loras.map(({name, strength, te, unet}) => (te === undefined ? {name, strength} : {name, te, unet}))
})

/** The table of a form's mode; null if something is missing. @param {CompareForm} form @returns {Sheet | null} */
export function sheetOf(form) {
	const {mode, loras, count} = form
	if (!loras.length) return null
	/** @param {number} to @param {number} n */
	const spread = (to, n) => Array.from({length: n}, (_, i) => Math.round((to * i * 100) / (n - 1)) / 100)
	/** @param {Choice} choice */
	const shown = ({name}) => nameOf(name)
	const names = loras.map(shown).join(" + ")
	if (mode === "sweep") {
		const [first, ...rest] = loras
		const strengths = spread(first.strength || 1, count)
		return {
			columns: strengths.map(written),
			labels: [shown(first)],
			rows: [strengths.map(strength => request(form, [{name: first.name, strength}, ...rest]))]
		}
	}
	if (mode === "pairs") {
		if (loras.length < 2) return null
		const [first, second, ...rest] = loras
		const down = spread(first.strength || 1, Math.min(count, 4))
		const across = spread(second.strength || 1, Math.min(count, 4))
		return {
			columns: across.map(value => `${shown(second)} ${written(value)}`),
			labels: down.map(value => `${shown(first)} ${written(value)}`),
			rows: down.map(a =>
				across.map(b => request(form, [{name: first.name, strength: a}, {name: second.name, strength: b}, ...rest]))
			)
		}
	}
	if (mode === "seeds") {
		const seeds = Array.from({length: count}, (_, index) => form.seed + index)
		return {
			columns: seeds.map(seed => t.seedOf(seed)),
			labels: [t.without, names],
			rows: [seeds.map(seed => request(form, [], seed)), seeds.map(seed => request(form, loras, seed))]
		}
	}
	return {columns: [t.without, names], labels: [""], rows: [[request(form, []), request(form, loras)]]}
}
