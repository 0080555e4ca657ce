// Styles, wildcards, upscaling and sheets: the part of the form that is loaded when it is opened.
import {
	api,
	app,
	Button,
	createStore,
	html,
	NumberField,
	Select,
	Slider,
	showError,
	Text,
	toast,
	useEffect,
	useState,
	useStore
} from "../../kit.js"
import {namesIn} from "./draft.js"
import {t} from "./strings.js"

/** @type {Store<{ styles: Style[] | null, wildcards: string[] }>} */
const lists = createStore({styles: /** @type {Style[] | null} */ (null), wildcards: /** @type {string[]} */ ([])})

async function load() {
	const [{styles}, {wildcards}] = await Promise.all([api("/v1/styles"), api("/v1/wildcards")])
	lists.set({styles, wildcards})
}

/** @param {{ draft: DraftStore }} props */
export function Extras({draft}) {
	useEffect(() => {
		load().catch(showError)
	}, [])
	return html`<div class="stack">
		<${Styles} draft=${draft} />
		<${Wildcards} draft=${draft} />
		<${Upscale} draft=${draft} />
		<${Grid} draft=${draft} />
		<p class="small muted">${t.noControlNet}</p>
	</div>`
}

/** @param {{ draft: DraftStore }} props */
function Styles({draft}) {
	const {styles: text, prompt, negative_prompt} = useStore(draft)
	const {styles} = useStore(lists)
	const [name, setName] = useState("")
	const [managed, setManaged] = useState(false)
	const chosen = namesIn(text)
	/** @param {string[]} names */
	const set = names => draft.set({styles: names.length ? JSON.stringify(names) : undefined})
	/** @param {string} each */
	const toggle = each => set(chosen.includes(each) ? chosen.filter(other => other !== each) : [...chosen, each])
	const save = () =>
		api("/v1/styles", {method: "PUT", json: {name: name.trim(), prompt, negative_prompt}})
			.then(load)
			.then(() => {
				setName("")
				toast(t.styleSaved(name.trim()))
			}, showError)
	/** @param {Style} style */
	const remove = style =>
		api("/v1/styles", {method: "DELETE", query: {name: style.name}})
			.then(load)
			.then(() => {
				set(chosen.filter(each => each !== style.name))
				const undo = () => api("/v1/styles", {method: "PUT", json: style}).then(load, showError)
				toast(t.styleRemoved(style.name), {action: {label: t.undo, run: undo}})
			}, showError)
	const missing = styles ? chosen.filter(each => !styles.some(style => style.name === each)) : []
	return html`<section class="stack stack-2" aria-labelledby="styles-title">
		<h2 id="styles-title" class="section-title">${t.styles}</h2>
		<div class="row wrap">
			${styles?.map(
				style => html`<span class="row" key=${style.name}>
				<button type="button" class="chip" aria-pressed=${chosen.includes(style.name)} title=${[style.prompt, style.negative_prompt && `− ${style.negative_prompt}`].filter(Boolean).join("\n")} onClick=${() => toggle(style.name)}>
					<span class="clip">${style.name}</span>
				</button>
				${managed && html`<${Button} kind="quiet" size="small" icon="trash" label=${t.removeStyle(style.name)} onClick=${() => remove(style)} />`}
			</span>`
			)}
			${missing.map(each => html`<button key=${each} type="button" class="chip" aria-pressed="true" onClick=${() => toggle(each)}><span class="clip">${each}</span> <span class="badge badge-bad">${t.missing}</span></button>`)}
		</div>
		${styles?.length === 0 && html`<p class="small muted">${t.noStyles}</p>`}
		<div class="row wrap">
			<button type="button" class="link small" aria-expanded=${managed} onClick=${() => setManaged(!managed)}>${managed ? t.done : t.manage}</button>
		</div>
		${
			managed &&
			html`<div class="extras-save">
				<${Text} label=${t.styleName} value=${name} hint=${t.styleHint} onChange=${setName} />
				<${Button} size="small" disabled=${!name.trim() || !(prompt || negative_prompt)} onClick=${save}>${t.saveStyle}<//>
			</div>`
		}
	</section>`
}

/** @param {{ draft: DraftStore }} props */
function Wildcards({draft}) {
	const {wildcards} = useStore(lists)
	/** @param {string} name */
	const add = name => draft.set(({prompt}) => ({prompt: `${prompt} __${name}__`.trim()}))
	return html`<section class="stack stack-2" aria-labelledby="wildcards-title">
		<h2 id="wildcards-title" class="section-title">${t.wildcards}</h2>
		<p class="small muted">${t.wildcardsText}</p>
		${wildcards.length > 0 && html`<div class="row wrap">${wildcards.slice(0, 100).map(name => html`<button key=${name} type="button" class="chip" onClick=${() => add(name)}><span class="clip">__${name}__</span></button>`)}</div>`}
	</section>`
}

/** @param {{ draft: DraftStore }} props */
function Upscale({draft}) {
	const state = useStore(draft)
	const {capabilities} = useStore(app)
	const own = capabilities?.models.find(model => (state.model ? model.name === state.model : model.default))
	const small = (own?.defaults?.size ?? 512) < 256
	const upscalers = capabilities?.upscalers ?? []
	const latent = upscalers.some(each => each.latent && each.name === state.upscaler)
	const usual = latent ? 0.6 : small ? 0 : 0.4
	const strength = state.upscale_strength ?? usual
	/** @type {[string, string][]} */
	const scales = [
		["", t.off],
		...[1.5, 2, 3, 4].map(each => /** @type {[string, string]} */ ([String(each), `${each} ×`]))
	]
	const scale = state.upscale_scale
	if (scale && !scales.some(([each]) => each === String(scale)))
		scales.push([String(scale), `${Math.round(scale * 100) / 100} ×`])
	return html`<section class="stack stack-2" aria-labelledby="upscale-title">
		<h2 id="upscale-title" class="section-title">${t.upscale}</h2>
		<div class="field-pairs">
			<${Select} label=${t.scale} value=${scale ? String(scale) : ""} options=${scales} onChange=${value => draft.set({upscale_scale: value ? Number(value) : undefined})} />
			${scale && html`<${Select} label=${t.upscaler} value=${state.upscaler ?? "lanczos"} options=${upscalers.map(each => [each.name, each.label])} onChange=${upscaler => draft.set({upscaler, upscale_strength: undefined})} />`}
		</div>
		${
			scale &&
			html`<${Slider} label=${t.repaint} value=${strength} onChange=${value => draft.set({upscale_strength: Math.min(1, Math.max(0, value))})} />
			<p class="field-hint">${strength > 0 ? (small ? t.repaintSmall : t.repaintHint) : t.onlyEnlarge}</p>
			${strength > 0 && html`<${NumberField} label=${t.upscaleSteps} min=${1} max=${150} placeholder=${t.sameSteps} value=${state.upscale_steps} onChange=${value => draft.set({upscale_steps: value})} />`}`
		}
	</section>`
}

/** The name and the values of an axis. @param {string} text */
const parts = text => /** @type {[string, string]} */ ([text.split("=", 1)[0], text.slice(text.indexOf("=") + 1)])

/** @param {{ draft: DraftStore }} props */
function Grid({draft}) {
	const state = useStore(draft)
	const {capabilities} = useStore(app)
	/** @type {[string, string][]} */
	const names = [
		["", t.none],
		...(capabilities?.axes ?? []).map(name => /** @type {[string, string]} */ ([name, t.axes[name] ?? name]))
	]
	/** @param {string} name */
	const example = name => {
		const offered = {
			sampler: capabilities?.samplers,
			schedule: capabilities?.schedules,
			style: namesIn(state.styles),
			model: capabilities?.models.map(each => each.name)
		}
		const own = /** @type {Record<string, string[] | undefined>} */ (offered)[name]?.slice(0, 3).join(", ")
		return t.examples[name] ?? own ?? ""
	}
	return html`<section class="stack stack-2" aria-labelledby="grid-title">
		<h2 id="grid-title" class="section-title">${t.grid}</h2>
		<p class="small muted">${t.gridText}</p>
		${
			/** @type {const} */ (["across", "down"]).map(side => {
				const [name, values] = state[side] ? parts(state[side]) : ["", ""]
				return html`<div class="field-pairs" key=${side}>
				<${Select} label=${t[side]} value=${name} options=${names} onChange=${next => draft.set({[side]: next ? `${next}=${example(next)}` : undefined})} />
				${name && html`<${Text} label=${t.values} value=${values} placeholder=${example(name)} hint=${name === "prompt" ? t.promptAxis : undefined} onChange=${next => draft.set({[side]: `${name}=${next}`})} />`}
			</div>`
			})
		}
	</section>`
}
