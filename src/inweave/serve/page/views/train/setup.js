// The form of a run: name, base, preset, a few settings; its check, and the start.
import {
	api,
	app,
	Button,
	bytes,
	cx,
	duration,
	html,
	Icon,
	NumberField,
	navigate,
	Select,
	showError,
	submitJob,
	submits,
	Text,
	useBusy,
	useEffect,
	useRef,
	useState,
	useStore
} from "../../kit.js"
import {changeForm, desk} from "./state.js"
import {t} from "./strings.js"

const CHART_POINTS = 200
/** after the last change, before it is checked */
const PAUSE = 800
const NUMBERS = [
	{name: "steps", min: 1},
	{name: "rank", min: 1, max: 1024},
	{name: "learning_rate", min: 0, step: "any"},
	{name: "batch_size", min: 1, max: 64},
	{name: "resolution", min: 16, max: 8192},
	{name: "save_every", min: 0},
	{name: "sample_every", min: 0},
	{name: "seed", min: 0},
	{name: "validation_split", min: 0, max: 0.9, step: 0.05}
]
const CHOICES = ["network", "optimizer", "lr_scheduler"]

/** @param {string} text a name that files can have */
const fileName = text =>
	text
		.normalize("NFKD")
		.replace(/[^A-Za-z0-9_.-]+/g, "-")
		.replace(/^[^A-Za-z0-9]+|[-.]+$/g, "")
		.slice(0, 60) || "lora"

/** The form with defaults for open fields. @param {Dataset} dataset @returns {RunForm} */
export function useForm(dataset) {
	const form = useStore(desk).forms[dataset.id]
	const name = dataset.built_in ? `my-${dataset.id.replace(/.*\//, "")}` : dataset.name
	return {name: fileName(name), model: "", preset: "style", trigger: "", prompts: "", overrides: {}, ...form}
}

/** The settings of the run. @param {Dataset} dataset @param {RunForm} form @param {TrainOptions | null} options */
function settingsOf(dataset, form, options) {
	const preset = options?.presets.find(each => each.name === form.preset)?.settings ?? {}
	const settings = /** @type {Fields} */ ({...preset, ...form.overrides})
	if (form.overrides.steps) {
		const every = Math.ceil(form.overrides.steps / 5)
		for (const name of ["save_every", "sample_every"]) settings[name] = form.overrides[name] ?? every
	}
	const trigger = form.trigger.trim()
	if (trigger) settings.trigger = trigger
	// an image without a caption shows what the trigger word means
	if (trigger && dataset.pictures.some(each => !each.caption.trim())) settings.caption = trigger
	const lines = form.prompts.split("\n").filter(line => line.trim())
	const prompts = lines.length ? lines : samplePrompts(dataset, trigger)
	if (settings.sample_every && prompts.length) settings.sample_prompts = prompts
	else settings.sample_every = 0
	settings.log_every = Math.max(1, Math.round((settings.steps ?? 2000) / CHART_POINTS))
	return settings
}

/** @param {Dataset} dataset @param {string} trigger */
const samplePrompts = (dataset, trigger) =>
	[...new Set(dataset.pictures.map(each => each.caption.trim().split("\n")[0]).filter(Boolean))]
		.slice(0, 2)
		.map(caption => (trigger && !caption.includes(trigger) ? `${trigger}, ${caption}` : caption))

/** @param {{ dataset: Dataset, form: RunForm }} props */
export function Setup({dataset, form}) {
	const models = useStore(app).capabilities?.models ?? []
	const {checked, checking, uploads} = useStore(desk)
	const [options, setOptions] = useState(/** @type {TrainOptions | null} */ (null))
	const [starting, during] = useBusy()
	useEffect(() => {
		api("/v1/train/options", {query: {model: form.model || null}})
			.then(setOptions)
			.catch(showError)
	}, [form.model])
	/** @param {Partial<RunForm>} patch */
	const change = patch => changeForm(dataset.id, patch)
	const request = {dataset: dataset.id, model: form.model || null, settings: settingsOf(dataset, form, options)}
	const words = t.setup
	// the report belongs to these settings and captions; any change is checked again, while one edits
	const key = JSON.stringify([request, dataset.pictures.map(each => [each.name, each.caption])])
	const report = checked?.key === key ? checked.report : null
	const able = Boolean(options && dataset.pictures.length && !(uploads && uploads.done < uploads.total))
	const shown = useRef(/** @type {HTMLElement | null} */ (null))
	const show = () => shown.current?.focus()
	const check = async () => {
		/** @param {CheckReport} answer */
		const answered = answer => desk.get().checking === key && desk.set({checked: {key, report: answer}, checking: ""})
		desk.set({checking: key})
		await api("/v1/train/check", {json: request})
			.then(answered)
			.catch(error => answered({ok: false, problems: error.problems?.length ? error.problems : [error.message]}))
	}
	useEffect(() => {
		if (!able || report || checking === key) return
		const timer = setTimeout(check, PAUSE)
		return () => clearTimeout(timer)
	}, [key, able])
	const start = () => {
		const job = submitJob({operation: "train", name: form.name, ...request})
		during(job.then(id => navigate("train", {job: id})))
	}
	const submit = () => (report?.ok ? start() : able && check().then(show))
	const waits = able && !report
	const preset = options?.presets.find(each => each.name === form.preset)
	return html`<form
		class="card train-setup"
		onSubmit=${submits(submit)}
	>
		<div class="panel stack train-fields scrolls">
		<h2>${words.title}</h2>
		<${Text} label=${words.name} value=${form.name} required pattern="[A-Za-z0-9][A-Za-z0-9_.\\-]*" maxlength="100" onChange=${name => change({name})} />
		<${Select}
			label=${words.base}
			value=${form.model}
			options=${models.map(each => [each.default ? "" : each.name, each.name])}
			onChange=${model => change({model})}
		/>
		<${Select}
			label=${words.preset}
			value=${form.preset}
			options=${(options?.presets ?? [{name: form.preset}]).map(({name}) => [name, words.presets[name] ?? name])}
			hint=${preset && words.presetHint(preset.settings.steps, preset.settings.rank)}
			onChange=${value => change({preset: value, overrides: {}})}
		/>
		<${Text} label=${words.trigger} hint=${words.triggerHint} value=${form.trigger} maxlength="200" onChange=${trigger => change({trigger})} />
		<details class="fold">
			<summary>${words.more}</summary>
			<div class="stack"><${More} form=${form} options=${options} preset=${preset?.settings ?? {}} change=${change} /></div>
		</details>
		<div ref=${shown} tabindex="-1" class=${cx("stack stack-2 train-report", !report && "train-stale")} role="region" aria-label=${t.report.title} aria-busy=${waits}>
			${able && checked ? html`<${Report} report=${report ?? checked.report} />` : html`<p class="field-hint">${words.checkHint}</p>`}
		</div>
		</div>
		<div class="stack stack-2 train-start">
			<p class="small" role="status">
				${able && (waits ? words.checking : report?.ok ? html`<span class="train-good">${words.ready(report.estimate && duration(report.estimate.seconds))}</span>` : html`<button type="button" class="link" onClick=${show}>${words.problems(report?.problems?.length ?? 1)}</button>`)}
			</p>
			<${Button} kind="primary" size="large" type="submit" icon=${report && !report.ok ? "check" : "play"} busy=${starting} disabled=${!able || waits}>
				${report && !report.ok ? words.check : words.start}
			<//>
		</div>
	</form>`
}

/** @param {MoreProps} props */
function More({form, options, preset, change}) {
	const table = Object.fromEntries((options?.settings ?? []).map(each => [each.name, each]))
	/** @param {string} name @param {any} value */
	const set = (name, value) => {
		const {[name]: _, ...rest} = form.overrides
		change({overrides: value === undefined ? rest : {...rest, [name]: value}})
	}
	const words = t.setup
	/** @param {string} name */
	const usual = name => preset[name] ?? table[name]?.default
	return html`<div class="field-pairs">
			${NUMBERS.map(
				({name, ...limits}) => html`<${NumberField}
					key=${name}
					label=${words.settings[name]}
					value=${form.overrides[name]}
					placeholder=${String(usual(name) ?? words.own)}
					onChange=${value => set(name, value)}
					...${limits}
				/>`
			)}
		</div>
		${CHOICES.map(
			name => html`<${Select}
				key=${name}
				label=${words.settings[name]}
				value=${form.overrides[name] ?? usual(name) ?? ""}
				options=${table[name]?.schema.enum ?? [usual(name) ?? ""]}
				onChange=${value => set(name, value === usual(name) ? undefined : value)}
			/>`
		)}
		<${Text} label=${words.prompts} hint=${words.promptsHint} rows="2" value=${form.prompts} onChange=${prompts => change({prompts})} />`
}

/** The trainer's report before a run. @param {{ report: CheckReport }} props */
function Report({report}) {
	const words = t.report
	const {estimate, device, dataset} = report
	return html`${report.problems?.map(each => html`<p class="field-error row"><${Icon} name="warning" /><span>${each}</span></p>`)}
		${
			estimate &&
			device &&
			dataset &&
			html`<dl>
				<div><dt>${words.memory}</dt><dd>${words.of(bytes(estimate.total_bytes), bytes(device.total_bytes), device.name)}</dd></div>
				<div><dt>${words.time}</dt><dd>${words.about(duration(estimate.seconds))}</dd></div>
				<div><dt>${words.steps}</dt><dd>${words.epochs(estimate.steps, estimate.steps / dataset.steps_per_epoch)}</dd></div>
				<div><dt>${words.buckets}</dt><dd>${Object.entries(dataset.buckets)
					.map(([size, n]) => `${size.replace("x", "×")} (${n})`)
					.join(", ")}</dd></div>
			</dl>`
		}
		${[...(report.warnings ?? []), ...(estimate?.choices ?? [])].map(each => html`<p class="train-warning row"><${Icon} name="info" /><span>${each}</span></p>`)}
		${report.ok && html`<p class="train-good row"><${Icon} name="check" /><span>${words.good}</span></p>`}`
}
