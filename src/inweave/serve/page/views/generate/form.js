// The form of an image, for Generate and Edit: prompt, LoRAs, settings, seed.
import {
	app,
	Button,
	cx,
	findModel,
	html,
	NumberField,
	Select,
	showError,
	Text,
	texts,
	useEffect,
	useState,
	useStore
} from "../../kit.js"
import {randomSeed} from "./draft.js"
import {Picker, Stack, Triggers} from "./loras.js"

const t = texts.generate
const SETTINGS = /** @type {const} */ (["steps", "guidance", "width", "height", "sampler", "schedule", "clip_skip"])

/**
 * Prompt, further main settings (`children`), LoRAs and settings.
 * @param {{ draft: DraftStore, size?: string, children?: any }} props size: placeholder of width and height
 */
export function Form({draft, size, children}) {
	const state = useStore(draft)
	const {capabilities} = useStore(app)
	/** @param {string} prompt */
	const onPrompt = prompt => draft.set({prompt})
	// until it is known whether there are models to choose from: fields that appear move nothing, fields that move do
	return html`<div class=${cx("stack generate-fields scrolls", !capabilities && "unsettled")}>
		${
			(capabilities?.models.length ?? 0) > 1 &&
			html`<${Select}
			label=${t.model}
			value=${state.model ?? findModel(capabilities, null)?.name ?? ""}
			options=${capabilities?.models.map(model => model.name) ?? []}
			onChange=${model => draft.set({model})}
		/>`
		}
		<div class="field">
			<label for="prompt">${t.prompt}</label>
			<textarea id="prompt" class="input prompt" rows="4" placeholder=${t.promptPlaceholder} value=${state.prompt} onInput=${e => onPrompt(e.currentTarget.value)}></textarea>
		</div>
		<${Triggers} prompt=${state.prompt} onPrompt=${onPrompt} />
		${children}
		<section class="stack" aria-labelledby="loras-title">
			<h2 id="loras-title" class="section-title">${t.loras}</h2>
			<${Stack} prompt=${state.prompt} onPrompt=${onPrompt} />
			<${Picker} prompt=${state.prompt} onPrompt=${onPrompt} model=${state.model} />
		</section>
		<${Settings} draft=${draft} size=${size} />
		<${Extras} draft=${draft} />
	</div>`
}

const EXTRAS = /** @type {const} */ (["upscale_scale", "styles", "across", "down"])

/** What is loaded once it is opened: styles, wildcards, upscaling, sheets. @param {{ draft: DraftStore }} props */
function Extras({draft}) {
	const state = useStore(draft)
	const {capabilities} = useStore(app)
	const used = EXTRAS.some(name => state[name])
	const [open, setOpen] = useState(used)
	const [module, setModule] = useState(/** @type {any} */ (null))
	useEffect(() => {
		if (open && !module) import("./extras.js").then(setModule, showError)
	}, [open])
	useEffect(() => {
		if (used) setOpen(true)
	}, [used])
	if (!capabilities?.features.includes("upscale")) return null
	return html`<details class="fold" open=${open} onToggle=${e => setOpen(e.currentTarget.open)}>
		<summary>${t.extras}</summary>
		${open && module && html`<${module.Extras} draft=${draft} />`}
	</details>`
}

/** @param {{ draft: DraftStore, size?: string }} props */
function Settings({draft, size}) {
	const state = useStore(draft)
	const {capabilities} = useStore(app)
	const defaults = findModel(capabilities, state.model)?.defaults
	const own = ["", t.own]
	/** @type {(name: string) => (value: any) => void} */
	const set = name => value => draft.set({[name]: value === "" ? undefined : value})
	const changed = SETTINGS.filter(name => state[name] !== undefined)
	return html`<details class="fold" open=${changed.length > 0 || state.negative_prompt !== ""}>
		<summary>${t.settings}</summary>
		<div class="stack">
			<${Text} label=${t.negative} rows="2" value=${state.negative_prompt} onChange=${negative_prompt => draft.set({negative_prompt})} />
			<div class="field-pairs">
				${
					/** @type {[(typeof SETTINGS)[number], any][]} */ ([
						["steps", {min: 1, max: 150, placeholder: defaults?.steps}],
						["guidance", {min: 0, step: 0.5, placeholder: defaults?.guidance}],
						["width", {min: 8, step: 8, placeholder: size ?? defaults?.size}],
						["height", {min: 8, step: 8, placeholder: size ?? defaults?.size}],
						["clip_skip", {min: 1, max: 12, placeholder: t.own}]
					]).map(
						([name, rest]) =>
							html`<${NumberField} key=${name} label=${t[name]} value=${state[name]} onChange=${set(name)} ...${rest} />`
					)
				}
				${/** @type {const} */ (["sampler", "schedule"]).map(name => html`<${Select} key=${name} label=${t[name]} value=${state[name] ?? ""} options=${[own, ...(capabilities?.[`${name}s`] ?? [])]} onChange=${set(name)} />`)}
			</div>
			${changed.length > 0 && html`<button type="button" class="link small" onClick=${() => draft.set(Object.fromEntries(changed.map(name => [name, undefined])))}>${t.reset}</button>`}
		</div>
	</details>`
}

/** @param {{ draft: DraftStore }} props */
export function Seed({draft}) {
	const {seed, locked, count} = useStore(draft)
	const most = useStore(app).capabilities?.limits.images_per_job
	return html`<div class="seed">
		<${NumberField} label=${t.seed} min=${0} value=${seed} placeholder=${t.randomSeed} onChange=${value => draft.set({seed: value, locked: value !== undefined})} />
		<div class="row seed-buttons">
			<${Button} kind="quiet" icon=${locked ? "lock" : "unlock"} label=${locked ? t.unlockSeed : t.lockSeed} aria-pressed=${locked} onClick=${() => draft.set({locked: !locked, ...(seed === undefined ? {seed: randomSeed()} : {})})} />
			<${Button} kind="quiet" icon="dice" label=${t.roll} onClick=${() => draft.set({seed: randomSeed()})} />
		</div>
		<${NumberField} label=${t.count} min=${1} max=${most} value=${count} placeholder="1" onChange=${value => draft.set({count: value})} />
	</div>`
}
