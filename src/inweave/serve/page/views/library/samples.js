// Sample images of LoRAs: one prompt and one seed, with the LoRA and without it.
import {
	ApiError,
	api,
	app,
	BeforeAfter,
	Button,
	createStore,
	findModel,
	formatTag,
	html,
	loadLoras,
	showError,
	submitJob,
	Thread,
	tagName,
	triggerWords,
	useStore,
	waitForJob
} from "../../kit.js"
import {t} from "./strings.js"

const PROMPT = "a cat"
const SEED = 1
/** runs after what people wait for */
const PRIORITY = -10

const work = createStore({done: 0, total: 0, current: "", stopped: false})
/** images without a LoRA, by their prompts and models: one for all LoRAs @type {Map<string, string>} */
const plain = new Map()

/** The model of this worker that a LoRA was made for; null: none. @param {Lora} lora */
function modelFor(lora) {
	const {capabilities} = app.get()
	const chosen = findModel(capabilities, null)
	const fits = [chosen, ...(capabilities?.models ?? [])].filter(
		model => model && (!lora.base || model.base === lora.base)
	)
	return fits[0]?.name ?? null
}

/** The LoRAs of which a sample can be made and none is there. @param {Lora[]} loras */
export const withoutImage = loras =>
	loras.filter(lora => !lora.preview && !lora.sample && !lora.error && modelFor(lora))

/** Make a sample of each. @param {Lora[]} loras */
export async function makeSamples(loras) {
	work.set({done: 0, total: loras.length, stopped: false})
	try {
		for (const lora of loras) {
			if (work.get().stopped) break
			work.set({current: lora.id})
			await makeSample(lora).catch(showError) // the others may succeed
			work.set(({done}) => ({done: done + 1}))
		}
	} finally {
		work.set({done: 0, total: 0, current: ""})
	}
}

/** @param {Lora} lora */
async function makeSample(lora) {
	const model = modelFor(lora)
	const prompt = [triggerWords(lora)[0], PROMPT].filter(Boolean).join(", ")
	const strength = lora.preferred_strength ?? 1
	const request = {model, seed: SEED, gallery: false, priority: PRIORITY}
	const tag = formatTag(tagName(lora, app.get().loras), strength, strength)
	const [made, without] = await Promise.all([
		submitJob({...request, prompt: `${prompt} ${tag}`}).then(finished),
		plainImage(`${model} ${prompt}`, {...request, prompt})
	])
	await api(`/v1/loras/${lora.id}/sample`, {json: {with: made, without}})
	await loadLoras()
}

/** @param {string} key @param {Fields} request */
async function plainImage(key, request) {
	const known = plain.get(key)
	// it may have expired since
	if (
		known &&
		(await api(`/v1/jobs/${known}`).then(
			job => job.state === "done",
			() => false
		))
	)
		return known
	const id = await submitJob(request).then(finished)
	plain.set(key, id)
	return id
}

/** The id of a job once it is done. @param {string} id */
async function finished(id) {
	const job = await waitForJob(id)
	if (job.state !== "done") throw new ApiError(409, job.error?.message ?? t.samples.cancelled)
	return id
}

/** A button that makes samples of all LoRAs that have no image. @param {{ loras: Lora[] }} props */
export function MakeSamples({loras}) {
	const {done, total} = useStore(work)
	const missing = withoutImage(loras)
	if (total > 0)
		return html`<div class="row library-making" role="status">
			<span class="small">${t.samples.progress(done, total)}</span>
			<span class="grow"><${Thread} percent=${(100 * done) / total} label=${t.samples.progress(done, total)} /></span>
			<${Button} size="small" icon="stop" onClick=${() => work.set({stopped: true})}>${t.samples.stop}<//>
		</div>`
	return (
		missing.length > 0 &&
		html`<${Button} size="small" icon="image" onClick=${() => makeSamples(missing)}>${t.samples.make(missing.length)}<//>`
	)
}

/** The sample of a LoRA with a slider, and a button to make it. @param {{ lora: Lora, onChange: () => void }} props */
export function SampleOf({lora, onChange}) {
	const {current, total} = useStore(work)
	const {loras} = useStore(app)
	const sample = loras?.find(each => each.id === lora.id)?.sample ?? lora.sample
	const able = !lora.error && modelFor(lora)
	const address = `/v1/loras/${lora.id}/sample?v=${sample?.version}`
	return html`<section>
		<h3>${t.samples.title}</h3>
		${
			sample &&
			html`<div class="library-sample"><${BeforeAfter}
					before=${`${address}&without=true`}
					after=${address}
					beforeLabel=${t.samples.without}
					afterLabel=${t.samples.with(sample.strength)}
					width=${sample.width}
					height=${sample.height}
					alt=${sample.prompt}
				/></div>
				<p class="muted small">${t.samples.made(sample.prompt, sample.seed, sample.model)}</p>`
		}
		${!sample && html`<p class="muted small">${able ? t.samples.none : t.samples.noModel}</p>`}
		${able && html`<${Button} size="small" icon="image" busy=${current === lora.id} disabled=${total > 0} onClick=${() => makeSamples([lora]).then(onChange)}>${current === lora.id ? t.samples.making : sample ? t.samples.again : t.samples.one}<//>`}
	</section>`
}
