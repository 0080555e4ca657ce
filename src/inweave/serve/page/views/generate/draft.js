// Forms for the next image. They survive changes of view and reloads, and are part of the address.
import {
	app,
	clearErrors,
	createStore,
	currentParams,
	findModel,
	persisted,
	remember,
	route,
	submitJob,
	texts,
	toast
} from "../../kit.js"

const t = texts.generate
const NUMBERS = ["seed", "steps", "guidance", "width", "height", "clip_skip", "count"]
const TEXTS = ["prompt", "negative_prompt", "model", "sampler", "schedule"]

/**
 * The form of a view, kept in its address.
 * @param {string} view @param {Partial<Draft>} [own] further numbers, with initial values
 * @param {() => Fields} [place] further fields of the address @returns {DraftStore}
 */
export function createDraft(view, own = {}, place = () => ({})) {
	const names = [...TEXTS, ...NUMBERS, ...Object.keys(own)]
	/** @type {Draft} */
	const empty = {prompt: "", negative_prompt: "", locked: false, ...own}
	const stored = persisted(view === "generate" ? "draft" : `draft-${view}`, empty)
	/** A patch that unsets every field. */
	const blank = () => ({...Object.fromEntries(names.map(name => [name, undefined])), ...empty})

	/** @param {Fields} settings */
	const patchOf = settings => {
		/** @type {Fields} */
		const patch = blank()
		for (const name of names) {
			const value = settings[name] ?? ""
			if (TEXTS.includes(name) ? value : value !== "" && Number.isFinite(Number(value)))
				patch[name] = TEXTS.includes(name) ? value : Number(value)
		}
		if (patch.count === 1) patch.count = undefined
		return /** @type {Draft} */ ({...patch, locked: patch.seed !== undefined})
	}
	/** The parameters of the address; null if none belongs to this form. */
	const opened = () => {
		const params = currentParams()
		return route.get().view === view && names.some(name => name in params) ? params : null
	}

	const first = opened()
	const store = createStore(first ? patchOf(first) : {...empty, ...stored.read()})
	const fields = () => {
		const state = /** @type {Fields} */ (store.get())
		return Object.fromEntries(
			names.filter(name => state[name] !== undefined && state[name] !== "").map(name => [name, state[name]])
		)
	}
	const write = () => {
		stored.write(store.get())
		const {seed, ...rest} = fields()
		remember(view, {...place(), ...rest, ...(store.get().locked ? {seed} : {})})
	}
	let timer = 0
	store.subscribe(() => {
		clearTimeout(timer)
		timer = setTimeout(write, 250)
	})
	route.subscribe(() => {
		const params = opened()
		if (params) store.set(patchOf(params))
	})
	return {...store, fields, remember: write, take: settings => store.set(patchOf(settings))}
}

export const draft = createDraft("generate")

export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0]

/** Jobs of this tab, whose failures are shown. @type {Set<string>} */
const mine = new Set()

/** Queue a job from a form. Returns its id. @param {DraftStore} form @param {Fields} more */
export async function submitDraft(form, more) {
	clearErrors() // of the images before
	const state = form.get()
	if (!state.locked || state.seed === undefined) form.set({seed: randomSeed()})
	const request = {...form.fields(), ...more}
	const steps = request.steps ?? findModel(app.get().capabilities, request.model)?.defaults?.steps ?? 20
	const id = await submitJob({...request, preview_every: Math.max(1, Math.round(steps / 6))})
	mine.add(id)
	return id
}

app.subscribe(() => {
	for (const job of app.get().ended ?? []) {
		if (!mine.delete(job.id)) continue
		if (job.state === "failed" && job.error) toast(job.error.message, {kind: "error"})
		const warnings = [...job.warnings, ...(job.result?.warnings ?? [])]
		if (warnings.length) toast(t.withWarnings, {kind: "warning", details: warnings})
	}
})
