// A run: its loss, samples over time, checkpoints; pause, resume, extend, use.
import {
	api,
	app,
	BADGES,
	Button,
	cancelJob,
	cx,
	Dialog,
	datasetTags,
	duration,
	Empty,
	FINAL,
	findLora,
	followJob,
	href,
	html,
	Icon,
	Loom,
	loadLoras,
	NumberField,
	navigate,
	refreshJobs,
	retryJob,
	showError,
	submits,
	Thread,
	texts,
	toast,
	triggerWords,
	useBusy,
	useEffect,
	useMemo,
	useState
} from "../../kit.js"
import {t as queueTexts} from "../queue/strings.js"
import {figure, LossChart} from "./chart.js"
import {t} from "./strings.js"

/** of the time-lapse, in milliseconds */
const FRAME = 600

/** @type {RunState} */
const START = {
	points: [],
	validations: [],
	samples: [],
	checkpoints: [],
	notes: [],
	phase: "queued",
	step: 0,
	total: 0,
	eta: null,
	preparing: null,
	end: null
}

/** @param {{ step?: number, validation?: number }} event @returns {Validation} */
const validationOf = ({step = 0, validation = 0}) => ({step, loss: validation})

/** @param {RunState} at @param {JobEvent} event @returns {RunState} */
function advance(at, event) {
	if (event.type === "progress")
		return {
			...at,
			phase: "running",
			preparing: null,
			step: event.step ?? at.step,
			total: event.total ?? at.total,
			eta: event.eta ?? null,
			points: [...at.points, {step: event.step ?? 0, loss: event.loss, loss_average: event.loss_average}]
		}
	if (event.type === "history")
		return {
			...at,
			points: event.records,
			validations: (event.validations ?? []).map(validationOf),
			step: event.resumed_from
		}
	if (event.type === "validation") return {...at, validations: [...at.validations, validationOf(event)]}
	if (event.type === "sample" && event.url)
		return {...at, samples: [...at.samples, {step: event.step ?? 0, index: event.index, url: event.url}]}
	if (event.type === "checkpoint") return {...at, checkpoints: [...at.checkpoints, event.step ?? 0]}
	if (event.type === "preparing") {
		const {done, total, activity} = event
		return {...at, phase: "preparing", preparing: {done, total: total ?? 0, activity}}
	}
	if (["started", "retried"].includes(event.type)) return {...START, phase: event.type}
	if (event.type === "loading") return {...at, phase: "loading"}
	if (FINAL.has(event.type)) return {...at, end: event.type, preparing: null}
	return event.text ? {...at, notes: [...at.notes, event.text]} : at
}

/** @param {{ id: string }} props */
export function Run({id}) {
	const [at, setAt] = useState(START)
	const [job, setJob] = useState(/** @type {Job | null} */ (null))
	const [gone, setGone] = useState("")
	const [busy, setBusy] = useState("")
	const [extending, setExtending] = useState(false)
	useEffect(() => {
		setAt(START)
		let state = START
		let due = 0
		const load = () => api(`/v1/jobs/${id}`).then(setJob)
		load().catch(error => error.status && setGone(error.message)) // a worker that restarts is waited for
		const stop = followJob(
			id,
			event => {
				state = advance(state, event)
				due ||= requestAnimationFrame(() => {
					due = 0
					setAt(state)
				})
				if (event.type === "started" || FINAL.has(event.type)) load().catch(() => {})
			},
			error => setGone(error.message)
		)
		return () => {
			cancelAnimationFrame(due)
			stop()
		}
	}, [id])
	if (gone && !job)
		return html`<${Empty} name=${id} title=${t.run.gone} text=${gone}><${Button} href=${href("train")}>${t.run.back}<//><//>`
	if (!job) return html`<h1 class="visually-hidden">${t.title}</h1>`
	const words = t.run
	const ended = FINAL.has(job.state)
	/** @param {string} name @param {() => Promise<any>} action */
	const act = (name, action) => {
		setBusy(name)
		action()
			.catch(showError)
			.finally(() => setBusy(""))
	}
	/** @param {string} next */
	const go = next => navigate("train", {job: next})
	const pause = () => cancelJob(id).then(() => setJob(before => before && {...before, cancel_requested: true}))
	/** @param {number | null} step */
	const use = async step => {
		const lora = step === null ? job.result?.adapter : await api(`/v1/jobs/${id}/checkpoints/${step}`, {method: "POST"})
		await loadLoras()
		const known = findLora(app.get().loras, lora.name)
		const prompt =
			job.settings.sample_prompts?.[0] ??
			job.settings.trigger ??
			(known ? [...triggerWords(known), ...datasetTags(known)][0] : "") ??
			""
		navigate("generate", {prompt: `${prompt.replace(/ --\w.*/, "")} <lora:${lora.name}:1>`.trim()})
		if (!ended)
			toast(words.waits, {
				until: state => state.ended?.some(each => each.id === id),
				action: {label: words.pause, run: () => pause().catch(showError)}
			})
	}
	const name = String(job.settings.name ?? "")
	const newest = job.state === "done" ? null : at.checkpoints.at(-1)
	return html`<header class="view-head">
			<div>
				<h1>${name}</h1>
				<p><span class=${`badge ${BADGES[job.state] ?? ""}`}>${words.states[job.cancel_requested && !ended ? "pausing" : job.state]}</span> ${job.model}
					${job.dataset && html` · <a href=${href("train", {dataset: job.dataset})}>${words.dataset}</a>`}</p>
			</div>
			<div class="row wrap">
				${newest !== undefined && html`<${Button} kind="primary" icon="generate" busy=${busy === "use"} onClick=${() => act("use", () => use(newest))}>${words.use}<//>`}
				${!ended && html`<${Button} icon="pause" disabled=${job.cancel_requested} onClick=${() => act("pause", pause)}>${words.pause}<//>`}
				${["failed", "cancelled"].includes(job.state) && html`<${Button} icon="play" busy=${busy === "resume"} onClick=${() => act("resume", () => retryJob(id).then(go))}>${at.step ? words.resume : words.again}<//>`}
				${ended && at.step > 0 && html`<${Button} icon="plus" onClick=${() => setExtending(true)}>${words.extend}<//>`}
			</div>
		</header>
		${job.error && html`<p class="train-problem field-error row" role="alert"><${Icon} name="warning" /><span>${job.error.message} ${queueTexts.advice[job.error.code] ?? ""}</span></p>`}
		<${Progress} job=${job} at=${at} ended=${ended} />
		<div class="train-run">
			<section class="card panel stack"><h2>${words.loss}</h2><${LossChart} points=${at.points} validations=${at.validations} total=${at.total} /></section>
			<section class="card panel stack"><h2>${words.samples}</h2><${Samples} samples=${at.samples} name=${name} prompts=${job.settings.sample_prompts ?? []} /></section>
		</div>
		${
			at.checkpoints.length > 0 &&
			html`<section class="stack train-section">
				<h2>${words.checkpoints}</h2>
				<${Checkpoints} at=${at} final=${job.state === "done" ? at.step : null} onUse=${(/** @type {number | null} */ step) => act("use", () => use(step))} />
			</section>`
		}
		${at.notes.length > 0 && html`<details class="fold train-section"><summary>${words.notes(at.notes.length)}</summary><ul class="train-notes">${at.notes.map(each => html`<li>${each}</li>`)}</ul></details>`}
		${extending && html`<${Extend} id=${id} done=${at.step} onClose=${() => setExtending(false)} onJob=${go} />`}`
}

/** @param {{ job: Job, at: RunState, ended: boolean }} props */
function Progress({job, at, ended}) {
	if (ended) return null
	const total = at.total || Number(job.settings.steps) || 0
	const percent = at.preparing
		? (100 * at.preparing.done) / (at.preparing.total || 1)
		: total
			? (100 * at.step) / total
			: null
	const text =
		job.state === "queued"
			? texts.generate.queued(job.position ?? 0)
			: at.preparing
				? `${texts.generate.phases.preparing}: ${at.preparing.activity}`
				: at.phase === "running"
					? [texts.generate.step(at.step, total), at.eta !== null && texts.generate.left(duration(at.eta))]
							.filter(Boolean)
							.join(" · ")
					: texts.generate.phases[at.phase]
	return html`<div class="train-progress"><p class="small num" role="status">${text}</p><${Thread} percent=${job.state === "queued" ? 0 : percent} label=${texts.generate.progress} /></div>`
}

/** The loss at a step: of the validation, or the running average. @param {RunState} at @param {number} step */
function lossAt({points, validations}, step) {
	if (validations.length) return validations.findLast(each => each.step <= step)?.loss ?? null
	return points.findLast(each => each.step <= step)?.loss_average ?? null
}

/**
 * Every checkpoint, and the end of a finished run, with the sample closest to it; the best one is marked.
 * @param {{ at: RunState, final: number | null, onUse: (step: number | null) => void }} props
 */
function Checkpoints({at, final, onUse}) {
	const words = t.run
	const validated = at.validations.length > 0
	const steps = [...new Set(final === null ? at.checkpoints : [...at.checkpoints, final])].sort((a, b) => b - a)
	const losses = new Map(steps.map(step => [step, lossAt(at, step)]))
	const known = steps.filter(step => losses.get(step) !== null)
	/** @param {number} step */
	const loss = step => losses.get(step) ?? Number.POSITIVE_INFINITY
	const best = known.length > 1 ? known.reduce((a, b) => (loss(b) < loss(a) ? b : a)) : null
	const images = at.samples.filter(each => each.index === 0)
	/** @param {number} step */
	const closest = step =>
		images.reduce(
			(/** @type {Sample | null} */ a, b) => (!a || Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a),
			null
		)
	return html`${best !== null && html`<p class="muted small">${words.bestBy(validated)}</p>`}
		<ul class="tiles train-checkpoints">${steps.map(step => {
			const image = closest(step)
			return html`<li key=${step}><div class=${cx("card train-checkpoint", step === best && "train-best")}>
					${
						(image || step === best) &&
						html`<div class="train-checkpoint-image cover">
						${image && html`<img src=${image.url} alt=${words.imageOf(image.step)} loading="lazy" />`}
						${step === best && html`<span class="badge badge-good"><${Icon} name="star" />${words.best}</span>`}
					</div>`
					}
					<p class="small num">${words.step(step)}</p>
					${losses.get(step) !== null && html`<p class="muted small num">${words.lossOf(figure(loss(step)), validated)}</p>`}
					<${Button} size="small" onClick=${() => onUse(step === final ? null : step)}>${words.useStep(step)}<//>
				</div></li>`
		})}</ul>`
}

/** @param {{ samples: Sample[], name: string, prompts: string[] }} props  the newest, or the one that was scrubbed to */
function Samples({samples, name, prompts}) {
	const [chosen, setChosen] = useState(/** @type {number | null} */ (null))
	const steps = useMemo(() => [...new Set(samples.map(each => each.step))].sort((a, b) => a - b), [samples])
	const [playing, setPlaying] = useState(false)
	const words = t.run
	const place = chosen === null ? steps.length - 1 : Math.max(0, steps.indexOf(chosen))
	/** @param {number} index */
	const pick = index => setChosen(index === steps.length - 1 ? null : steps[index])
	/** @param {number} index */
	const choose = index => {
		setPlaying(false)
		pick(index)
	}
	const play = () => {
		for (const each of samples) new Image().src = each.url // shown without a gap
		if (!playing && place === steps.length - 1) pick(0)
		setPlaying(!playing)
	}
	useEffect(() => {
		if (!playing) return
		const timer = setTimeout(() => {
			if (place + 1 < steps.length) pick(place + 1)
			if (place + 2 >= steps.length) setPlaying(false)
		}, FRAME)
		return () => clearTimeout(timer)
	}, [playing, place, steps.length])
	if (!steps.length)
		return html`<div class="train-sample-empty"><div class="train-loom"><${Loom} name=${name} percent=${35} /></div><p class="muted small">${words.noSamples}</p></div>`
	const step = steps[place]
	return html`<div class="train-samples">
			${samples
				.filter(each => each.step === step)
				.map(
					each =>
						html`<figure key=${each.index}><img src=${each.url} alt=${words.sampleOf(prompts[each.index] ?? name, step)} /><figcaption class="small muted clip">${(prompts[each.index] ?? "").replace(/ --\w.*/, "")}</figcaption></figure>`
				)}
		</div>
		${
			steps.length > 1 &&
			html`<div class="row train-scrub"><${Button} size="small" icon=${playing ? "pause" : "play"} label=${playing ? words.stop : words.play} onClick=${play} />
			<label class="small num row grow train-scrub"><span>${words.step(step)}</span>
			<input type="range" min="0" max=${steps.length - 1} step="1" value=${place} aria-valuetext=${words.step(step)} style=${{"--to": `${(100 * place) / (steps.length - 1)}%`}} onInput=${e => choose(Number(e.currentTarget.value))} />
		</label></div>`
		}
		<ol class="train-strip">${steps.map((each, index) => {
			const first = samples.find(sample => sample.step === each)
			return html`<li key=${each}><button type="button" aria-label=${words.step(each)} aria-current=${index === place ? "true" : undefined} onClick=${() => choose(index)}><img src=${first?.url} alt="" loading="lazy" /></button></li>`
		})}</ol>`
}

/** @param {ExtendProps} props */
function Extend({id, done, onClose, onJob}) {
	const [busy, during] = useBusy()
	const [steps, setSteps] = useState(/** @type {number | undefined} */ (Math.ceil(done * 1.5)))
	const words = t.run
	const submit = () => {
		const extended = api(`/v1/jobs/${id}/extend`, {json: {steps}})
		during(
			extended.then(answer => {
				refreshJobs()
				onClose()
				onJob(answer.id)
			})
		)
	}
	return html`<${Dialog} title=${words.extend} onClose=${onClose}>
		<form class="stack" onSubmit=${submits(submit)}>
			<p>${words.extendText(done)}</p>
			<${NumberField} label=${words.extendTo} value=${steps} min=${done + 1} onChange=${setSteps} />
			<div class="dialog-actions"><${Button} kind="primary" type="submit" busy=${busy} disabled=${!steps || steps <= done}>${words.extend}<//></div>
		</form>
	<//>`
}
