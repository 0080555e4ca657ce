// Queue: running and waiting jobs, and those that ended.
import {
	ago,
	app,
	BADGES,
	Button,
	cancelJob,
	cx,
	duration,
	Empty,
	forgetJob,
	href,
	html,
	loadOlder,
	moveJob,
	pauseQueue,
	retryJob,
	Swatch,
	showError,
	statusOf,
	Thread,
	texts,
	useReorder,
	useShortcuts,
	useStore
} from "../kit.js"
import {Devices, useQueue} from "./queue/devices.js"
import {t} from "./queue/strings.js"
import {titleOf} from "./queue/title.js"

export function View() {
	const {active, ended, paused, endedNext: next} = useStore(app)
	const running = active?.filter(job => job.state === "running") ?? []
	const waiting = active?.filter(job => job.state === "queued") ?? []
	const queue = useQueue(waiting.length)
	const toggle = () => pauseQueue(!paused).catch(showError)
	useShortcuts(t.title, [["b", t.keys.pause, toggle]])
	return html`<div class="queue">
		<header class="view-head">
			<div>
				<h1>${t.title}</h1>
				<p>${paused ? t.paused : t.text}</p>
			</div>
			<${Button} icon=${paused ? "play" : "pause"} kind=${paused ? "primary" : "plain"} onClick=${toggle}>${paused ? t.resume : t.pause}<//>
		</header>
		${active?.length === 0 && html`<${Empty} name="all woven" title=${t.emptyTitle} text=${t.emptyText}><${Button} kind="primary" href=${href("generate")}>${t.emptyAction}<//><//>`}
		${
			running.length > 0 &&
			html`<section>
				<h2>${t.running}</h2>
				<ul class="stack stack-2 queue-list">
					${running.map(job => html`<${Running} key=${job.id} job=${job} />`)}
				</ul>
			</section>`
		}
		${waiting.length > 0 && html`<${Waiting} jobs=${waiting} reasons=${queue.reasons} />`}
		${queue.devices.length + queue.nodes.length > 0 && html`<${Devices} ...${queue} jobs=${running} />`}
		${
			(ended?.length ?? 0) > 0 &&
			html`<section>
				<h2>${t.ended}</h2>
				<ul class="stack stack-2 queue-list">
					${ended?.map(job => html`<${Ended} key=${job.id} job=${job} />`)}
				</ul>
				${next !== null && html`<${Button} onClick=${() => loadOlder().catch(showError)}>${texts.actions.more}<//>`}
			</section>`
		}
	</div>`
}

/** @param {Job} job @param {string} title */
const linked = (job, title) =>
	job.operation === "train" ? html`<a href=${href("train", {job: job.id})}>${title}</a>` : title

/** @param {{ job: Job }} props */
const Thumbnail = ({job}) => html`<span class="queue-image cover">
	${job.result?.images?.[0] ? html`<img src=${job.result.images[0].url} alt="" loading="lazy" />` : html`<${Swatch} name=${job.id} />`}
</span>`

/** @param {{ job: Job }} props */
function Facts({job}) {
	const count = job.settings.count ?? 1
	return html`<p class="queue-facts">
		<span>${t.operations[job.operation]}</span>
		${job.operation !== "train" && count > 1 && html`<span>${t.images(count)}</span>`}
		<span>${job.model}</span>
		<span>${ago(job.finished ?? job.created)}</span>
		${job.attempts > 1 && html`<span class="badge badge-warning">${t.attempts}</span>`}
	</p>`
}

/** @param {{ job: Job }} props */
function Running({job}) {
	const progress = useStore(app).progress[job.id]
	const title = titleOf(job)
	return html`<li class="row queue-item card" data-job=${job.id}>
		<span class="queue-image cover">
			${progress?.preview ? html`<img src=${progress.preview} alt="" />` : html`<${Swatch} name=${job.id} />`}
		</span>
		<div class="grow stack queue-body">
			<p class="queue-title clip">${linked(job, title)}</p>
			<${Thread} percent=${progress?.total ? progress.percent : null} label=${texts.generate.progress} />
			<p class="queue-facts num"><span>${statusOf(job, progress)}</span>${progress?.eta ? html`<span>${texts.generate.left(duration(progress.eta))}</span>` : null}</p>
		</div>
		<${Button} kind="quiet" icon="stop" label=${t.cancel(title)} disabled=${job.cancel_requested} onClick=${() => cancelJob(job.id).catch(showError)} />
	</li>`
}

/** @param {{ jobs: Job[], reasons: Record<string, string> }} props */
function Waiting({jobs, reasons}) {
	/** @param {number} from @param {number} to */
	const move = (from, to) => moveJob(jobs[from].id, to).catch(showError)
	const reorder = useReorder(
		jobs.map(job => job.id),
		move
	)
	return html`<section>
		<h2>${t.waiting} <span class="muted num">${jobs.length}</span></h2>
		<ol class="stack stack-2 queue-list">
			${jobs.map((job, index) => {
				const title = titleOf(job)
				const {item, grip} = reorder(index, t.move(title))
				return html`<li key=${job.id} data-job=${job.id} class="row queue-item card" ...${item}>
					${grip}
					<span class="queue-number num muted">${index + 1}</span>
					<div class="grow queue-body">
						<p class="queue-title clip">${linked(job, title)}</p>
						<${Facts} job=${job} />
						${reasons[job.id] && html`<p class="queue-reason">${t.waitsFor(reasons[job.id])}</p>`}
					</div>
					${index > 0 && html`<${Button} kind="quiet" size="small" class="queue-next" onClick=${() => move(index, 0)}>${t.first}<//>`}
					<${Button} kind="quiet" icon="close" label=${t.cancel(title)} onClick=${() => cancelJob(job.id).catch(showError)} />
				</li>`
			})}
		</ol>
	</section>`
}

/** @param {{ job: Job }} props */
function Ended({job}) {
	const title = titleOf(job)
	const advice = job.error && t.advice[job.error.code]
	return html`<li class="row queue-item queue-ended" data-job=${job.id}>
		<${Thumbnail} job=${job} />
		<div class="grow queue-body">
			<p class="row"><span class="queue-title clip">${linked(job, title)}</span><span class=${cx("badge", BADGES[job.state])}>${t.states[job.state]}</span></p>
			${job.error ? html`<p class="queue-error">${job.error.message}${advice ? html` <span class="muted">${advice}</span>` : null}</p>` : html`<${Facts} job=${job} />`}
		</div>
		<${Button} kind="quiet" size="small" icon="reuse" label=${`${t.retry}: ${title}`} onClick=${() => retryJob(job.id).catch(showError)} />
		<${Button} kind="quiet" size="small" icon="close" label=${`${t.forget}: ${title}`} onClick=${() => forgetJob(job.id).catch(showError)} />
	</li>`
}
