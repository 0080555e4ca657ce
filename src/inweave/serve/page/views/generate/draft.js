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
const SIDES = ["left", "top", "right", "bottom"]
const UPSCALE = ["scale", "strength", "steps"]
const NUMBERS = ["seed", "steps", "guidance", "width", "height", "clip_skip", "count"].concat(
	UPSCALE.map(name => `upscale_${name}`),
	SIDES.map(name => `outpaint_${name}`)
)
/** `styles`, `references`: names, as JSON; `across` and `down`: the axes of a sheet, as the API spells them */
const TEXTS = [
	"prompt",
	"negative_prompt",
	"model",
	"sampler",
	"schedule",
	"upscaler",
	"styles",
	"across",
	"down"
].concat("references")

/** The request of a form, whose fields are flat. @param {Fields} fields @returns {Fields} */
export function requestOf({upscaler, styles, references, across, down, ...fields}) {
	/** @param {string} prefix @param {string[]} names */
	const take = (prefix, names) => {
		const pairs = names.map(name => [name, fields[`${prefix}_${name}`]])
		for (const name of names) delete fields[`${prefix}_${name}`]
		return Object.fromEntries(pairs.filter(([, value]) => value !== undefined))
	}
	const upscale = take("upscale", UPSCALE)
	const outpaint = take("outpaint", SIDES)
	if (upscale.scale) fields.upscale = {...upscale, upscaler: upscaler || undefined}
	if (Object.values(outpaint).some(Boolean)) fields.outpaint = outpaint
	if (styles) fields.styles = namesIn(styles)
	if (references) fields.references = namesIn(references)
	if (across || down) fields.grid = [across, down].filter(Boolean)
	return fields
}

/** The names in a field of the form. @param {string | undefined} text @returns {string[]} */
export function namesIn(text) {
	try {
		return JSON.parse(text || "[]")
	} catch {
		return [] // an address that was cut off
	}
}

/** The fields of a form for the settings of an image. @param {Fields} settings @returns {Fields} */
const flat = ({upscale, outpaint, grid, styles, template, ...settings}) => {
	// the cells of a sheet made choices of their own
	const written = grid?.length && template ? template : {}
	const {upscaler, width, ...rest} = upscale ?? {}
	if (upscale && !rest.scale) rest.scale = width && settings.width ? width / settings.width : 2
	/** @param {string} prefix @param {Fields} fields */
	const named = (prefix, fields) =>
		Object.fromEntries(Object.entries(fields ?? {}).map(([name, value]) => [`${prefix}_${name}`, value]))
	const chosen = written.styles ?? styles
	const names = Array.isArray(chosen) ? (chosen.length ? JSON.stringify(chosen) : "") : chosen
	const {prompt, negative_prompt} = {...settings, ...written}
	const [across, down] = grid ?? [settings.across, settings.down]
	return {
		...settings,
		...named("upscale", rest),
		...named("outpaint", outpaint),
		upscaler: upscaler ?? settings.upscaler,
		styles: names,
		references: undefined, // of an image: its settings name them, and do not hold them
		prompt,
		negative_prompt,
		across,
		down
	}
}

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
	return {...store, fields, remember: write, take: settings => store.set(patchOf(flat(settings)))}
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
	const request = {...requestOf(form.fields()), ...more}
	if (!request.image) delete request.outpaint // of an image whose settings were taken
	if (!findModel(app.get().capabilities, request.model)?.references) delete request.references // of another model
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
