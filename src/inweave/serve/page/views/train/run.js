// A run: its loss, samples over time, checkpoints; pause, resume, extend, use.
import {
	api,
	app,
	BADGES,
	Button,
	cancelJob,
	Dialog,
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
import {LossChart} from "./chart.js"
import {t} from "./strings.js"

/** @type {RunState} */
const START = {
	points: [],
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
	if (event.type === "history") return {...at, points: event.records, step: event.resumed_from}
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
			job.settings.sample_prompts?.[0] ?? job.settings.trigger ?? (known ? triggerWords(known)[0] : "") ?? ""
		navigate("generate", {prompt: `${prompt.replace(/ --\w.*/, "")} <lora:${lora.name}:1>`.trim()})
		if (!ended) toast(words.waits, {action: {label: words.pause, run: () => pause().catch(showError)}})
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
		${job.error && html`<p class="train-problem field-error row" role="alert"><${Icon} name="warning" /><span>${job.error.message} ${texts.queue.advice[job.error.code] ?? ""}</span></p>`}
		<${Progress} job=${job} at=${at} ended=${ended} />
		<div class="train-run">
			<section class="card panel stack"><h2>${words.loss}</h2><${LossChart} points=${at.points} total=${at.total} /></section>
			<section class="card panel stack"><h2>${words.samples}</h2><${Samples} samples=${at.samples} name=${name} prompts=${job.settings.sample_prompts ?? []} /></section>
		</div>
		${
			at.checkpoints.length > 0 &&
			html`<section class="stack train-section">
				<h2>${words.checkpoints}</h2>
				<div class="row wrap">${[...at.checkpoints]
					.sort((a, b) => b - a)
					.map(
						step =>
							html`<button key=${step} type="button" class="chip" onClick=${() => act("use", () => use(step))}>${words.useStep(step)}</button>`
					)}</div>
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

/** @param {{ samples: Sample[], name: string, prompts: string[] }} props  the newest, or the one that was scrubbed to */
function Samples({samples, name, prompts}) {
	const [chosen, setChosen] = useState(/** @type {number | null} */ (null))
	const steps = useMemo(() => [...new Set(samples.map(each => each.step))].sort((a, b) => a - b), [samples])
	const words = t.run
	if (!steps.length)
		return html`<div class="train-sample-empty"><div class="train-loom"><${Loom} name=${name} percent=${35} /></div><p class="muted small">${words.noSamples}</p></div>`
	const place = chosen === null ? steps.length - 1 : Math.max(0, steps.indexOf(chosen))
	const step = steps[place]
	/** @param {number} index */
	const pick = index => setChosen(index === steps.length - 1 ? null : steps[index])
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
			html`<label class="small num row train-scrub"><span>${words.step(step)}</span>
			<input type="range" min="0" max=${steps.length - 1} step="1" value=${place} aria-valuetext=${words.step(step)} style=${{"--to": `${(100 * place) / (steps.length - 1)}%`}} onInput=${e => pick(Number(e.currentTarget.value))} />
		</label>`
		}
		<ol class="train-strip">${steps.map((each, index) => {
			const first = samples.find(sample => sample.step === each)
			return html`<li key=${each}><button type="button" aria-label=${words.step(each)} aria-current=${index === place ? "true" : undefined} onClick=${() => pick(index)}><img src=${first?.url} alt="" loading="lazy" /></button></li>`
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
