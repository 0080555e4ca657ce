// Queue: what runs, what waits in which order, what ended and why.
import { cx, html, useState } from "../lib/dom.js";
import { ago, duration } from "../lib/format.js";
import { cancelJob, forgetJob, loadOlder, moveJob, pauseQueue, retryJob } from "../lib/jobs.js";
import { useShortcuts } from "../lib/keys.js";
import { withoutTags } from "../lib/prompt.js";
import { href } from "../lib/router.js";
import { app } from "../lib/state.js";
import { useStore } from "../lib/store.js";
import { t } from "../strings.js";
import { Button } from "../ui/button.js";
import { Empty } from "../ui/empty.js";
import { Icon } from "../ui/icons.js";
import { Swatch, Thread } from "../ui/swatch.js";
import { showError } from "../ui/toast.js";

export function View() {
	const active = useStore(app, (state) => state.active);
	const ended = useStore(app, (state) => state.ended);
	const paused = useStore(app, (state) => state.paused);
	const next = useStore(app, (state) => state.endedNext);
	const running = active?.filter((job) => job.state === "running") ?? [];
	const waiting = active?.filter((job) => job.state === "queued") ?? [];
	const toggle = () => pauseQueue(!paused).catch(showError);
	useShortcuts([{ keys: "b", label: t.queue.keys.pause, group: t.queue.title, run: toggle }]);
	return html`<div class="queue">
		<header class="view-head">
			<div>
				<h1>${t.queue.title}</h1>
				<p>${paused ? t.queue.paused : t.queue.text}</p>
			</div>
			<${Button} icon=${paused ? "play" : "pause"} kind=${paused ? "primary" : "plain"} onClick=${toggle}>${paused ? t.queue.resume : t.queue.pause}<//>
		</header>
		${active?.length === 0 && html`<${Empty} name="all woven" title=${t.queue.emptyTitle} text=${t.queue.emptyText}><${Button} kind="primary" href=${href("generate")}>${t.queue.emptyAction}<//><//>`}
		${
			running.length > 0 &&
			html`<section>
				<h2>${t.queue.running}</h2>
				<ul class="queue-list">
					${running.map((job) => html`<${Running} key=${job.id} job=${job} />`)}
				</ul>
			</section>`
		}
		${waiting.length > 0 && html`<${Waiting} jobs=${waiting} />`}
		${
			(ended?.length ?? 0) > 0 &&
			html`<section>
				<h2>${t.queue.ended}</h2>
				<ul class="queue-list">
					${ended?.map((job) => html`<${Ended} key=${job.id} job=${job} />`)}
				</ul>
				${next !== null && html`<${Button} onClick=${() => loadOlder().catch(showError)}>${t.actions.more}<//>`}
			</section>`
		}
	</div>`;
}

/** @param {Job} job what it makes, in a few words */
export function titleOf(job) {
	if (job.operation === "train") return t.queue.training(String(job.settings.name ?? ""));
	return withoutTags(job.settings.prompt ?? "") || t.queue.noPrompt;
}

/** @param {Job} job @param {string} title */
const linked = (job, title) =>
	job.operation === "train" ? html`<a href=${href("train", { job: job.id })}>${title}</a>` : title;

/** @param {{ job: Job }} props */
const Picture = ({ job }) => html`<span class="queue-picture">
	${job.result?.images?.[0] ? html`<img src=${job.result.images[0].url} alt="" loading="lazy" />` : html`<${Swatch} name=${job.id} />`}
</span>`;

/** @param {{ job: Job }} props */
function Facts({ job }) {
	const count = job.settings.count ?? 1;
	return html`<p class="queue-facts">
		<span>${t.queue.operations[job.operation]}</span>
		${job.operation !== "train" && count > 1 && html`<span>${t.queue.pictures(count)}</span>`}
		<span>${job.model}</span>
		<span>${ago(job.finished ?? job.created)}</span>
		${job.attempts > 1 && html`<span class="badge badge-warning">${t.queue.attempts}</span>`}
	</p>`;
}

/** @param {{ job: Job }} props */
function Running({ job }) {
	const progress = useStore(app, (state) => state.progress[job.id]);
	const title = titleOf(job);
	const status = job.cancel_requested
		? t.queue.cancelling
		: progress?.total
			? t.generate.step(progress.step, progress.total)
			: t.generate.phases[progress?.phase ?? "started"];
	return html`<li class="queue-item card" data-job=${job.id}>
		<span class="queue-picture">
			${progress?.preview ? html`<img src=${progress.preview} alt="" />` : html`<${Swatch} name=${job.id} />`}
		</span>
		<div class="grow stack queue-body">
			<p class="queue-title clip">${linked(job, title)}</p>
			<${Thread} percent=${progress?.total ? progress.percent : null} label=${t.generate.progress} />
			<p class="queue-facts num"><span>${status}</span>${progress?.eta ? html`<span>${t.generate.left(duration(progress.eta))}</span>` : null}</p>
		</div>
		<${Button} kind="quiet" icon="stop" label=${t.queue.cancel(title)} disabled=${job.cancel_requested} onClick=${() => cancelJob(job.id).catch(showError)} />
	</li>`;
}

/** @param {{ jobs: Job[] }} props */
function Waiting({ jobs }) {
	const [dragged, setDragged] = useState(/** @type {string | null} */ (null));
	const [target, setTarget] = useState(/** @type {number | null} */ (null));
	const move = (/** @type {Job} */ job, /** @type {number} */ to) => {
		if (to >= 0 && to < jobs.length) moveJob(job.id, to).catch(showError);
	};
	return html`<section>
		<h2>${t.queue.waiting} <span class="muted num">${jobs.length}</span></h2>
		<ol class="queue-list">
			${jobs.map((job, index) => {
				const title = titleOf(job);
				return html`<li
					key=${job.id}
					data-job=${job.id}
					class=${cx("queue-item card", dragged === job.id && "queue-dragged", target === index && dragged !== job.id && "queue-target")}
					onDragOver=${(/** @type {DragEvent} */ event) => {
						if (!dragged) return;
						event.preventDefault();
						setTarget(index);
					}}
					onDrop=${(/** @type {DragEvent} */ event) => {
						event.preventDefault();
						const moved = jobs.find((each) => each.id === dragged);
						setDragged(null);
						setTarget(null);
						if (moved) move(moved, index);
					}}
				>
					<button
						type="button"
						class="lora-grip"
						draggable="true"
						aria-label=${t.queue.move(title)}
						title=${t.queue.move(title)}
						onDragStart=${(/** @type {DragEvent} */ event) => {
							event.dataTransfer?.setData("text/plain", job.id);
							setDragged(job.id);
						}}
						onDragEnd=${() => {
							setDragged(null);
							setTarget(null);
						}}
						onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
							const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
							if (!step) return;
							event.preventDefault();
							move(job, index + step);
						}}
					>
						<${Icon} name="grip" />
					</button>
					<span class="queue-number num muted">${index + 1}</span>
					<div class="grow queue-body">
						<p class="queue-title clip">${linked(job, title)}</p>
						<${Facts} job=${job} />
					</div>
					${index > 0 && html`<${Button} kind="quiet" size="small" class="queue-next" onClick=${() => move(job, 0)}>${t.queue.first}<//>`}
					<${Button} kind="quiet" icon="close" label=${t.queue.cancel(title)} onClick=${() => cancelJob(job.id).catch(showError)} />
				</li>`;
			})}
		</ol>
	</section>`;
}

const BADGES = { done: "badge-good", failed: "badge-bad", cancelled: "", queued: "", running: "badge-active" };

/** @param {{ job: Job }} props */
function Ended({ job }) {
	const title = titleOf(job);
	const advice = job.error && t.queue.advice[job.error.code];
	return html`<li class="queue-item queue-ended" data-job=${job.id}>
		<${Picture} job=${job} />
		<div class="grow queue-body">
			<p class="row"><span class="queue-title clip">${linked(job, title)}</span><span class=${cx("badge", BADGES[job.state])}>${t.queue.states[job.state]}</span></p>
			${job.error ? html`<p class="queue-error">${job.error.message}${advice ? html` <span class="muted">${advice}</span>` : null}</p>` : html`<${Facts} job=${job} />`}
		</div>
		<${Button} kind="quiet" size="small" icon="reuse" label=${`${t.queue.retry}: ${title}`} onClick=${() => retryJob(job.id).catch(showError)} />
		<${Button} kind="quiet" size="small" icon="close" label=${`${t.queue.forget}: ${title}`} onClick=${() => forgetJob(job.id).catch(showError)} />
	</li>`;
}
