// The large picture: what is being made, or the one that was chosen from the gallery.
import { html } from "../../lib/dom.js";
import { decimal, duration, strength } from "../../lib/format.js";
import { cancelJob, deletePicture } from "../../lib/jobs.js";
import { formatTag, parseTags } from "../../lib/prompt.js";
import { href } from "../../lib/router.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { Empty } from "../../ui/empty.js";
import { Loom, Thread } from "../../ui/swatch.js";
import { showError, toast } from "../../ui/toast.js";
import { draft } from "./draft.js";

/** A job that runs or waits. @param {{ job: Job }} props */
export function Running({ job }) {
	const progress = useStore(app, (state) => state.progress[job.id]);
	const percent = progress?.total ? progress.percent : null;
	const width = job.settings.width ?? 1;
	const height = job.settings.height ?? 1;
	const status =
		job.state === "queued"
			? t.generate.queued(job.position ?? 0)
			: job.cancel_requested
				? t.queue.cancelling
				: progress?.total
					? t.generate.step(progress.step, progress.total)
					: t.generate.phases[progress?.phase ?? "started"];
	return html`<figure class="stage" data-job=${job.id}>
		<div class="stage-picture" style=${{ "--ratio": `${width} / ${height}` }}>
			${
				progress?.preview
					? html`<img src=${progress.preview} alt=${t.generate.preview} />`
					: html`<div class="stage-cloth"><${Loom} name=${job.id} percent=${percent ?? 0} /></div>`
			}
		</div>
		<figcaption class="stage-caption">
			<${Thread} percent=${job.state === "queued" ? 0 : percent} label=${t.generate.progress} />
			<div class="row spread">
				<span class="num">${status}</span>
				<span class="muted num">${progress?.eta ? t.generate.left(duration(progress.eta)) : ""}</span>
				<${Button} size="small" icon="stop" disabled=${job.cancel_requested} onClick=${() => cancelJob(job.id).catch(showError)}>${t.generate.cancel}<//>
			</div>
		</figcaption>
	</figure>`;
}

/**
 * The prompt of a picture with all its LoRAs as tags, so that the form can show them.
 * @param {{ job: Job, image: { settings: ImageSettings } }} picture
 */
export function promptOf({ job, image }) {
	const prompt = image.settings.prompt ?? "";
	const tagged = new Set(parseTags(prompt).map((tag) => tag.name));
	const others = (image.settings.loras ?? []).filter((lora) => !tagged.has(lora.name ?? lora.hash ?? ""));
	const tags = others.map((lora) => {
		const plain = lora.strength ?? 1;
		return formatTag(lora.name ?? lora.hash ?? "", lora.te ?? plain, lora.unet ?? plain);
	});
	return {
		...image.settings,
		prompt: [prompt, ...tags].filter(Boolean).join(" "),
		loras: undefined,
		count: undefined,
		model: app.get().capabilities?.models.length === 1 ? undefined : job.model,
	};
}

/** @param {Picture} picture */
export function usePicture(picture) {
	draft.take(promptOf(picture));
	toast(t.generate.restored);
}

/** @param {Picture} picture */
export function removePicture({ job, image }) {
	deletePicture(job.id, image.file).then(() => toast(t.generate.deleted), showError);
}

/** @param {{ picture: Picture }} props */
export function Finished({ picture }) {
	const { job, image } = picture;
	const name = t.generate.pictureOf(image.settings.prompt, image.seed);
	const place = { job: job.id, image: image.index };
	return html`<figure class="stage" data-job=${job.id}>
		<div class="stage-picture" style=${{ "--ratio": `${image.width} / ${image.height}` }}>
			<img src=${image.url} width=${image.width} height=${image.height} alt=${name} />
		</div>
		<figcaption class="stage-caption">
			<div class="row wrap">
				<${Button} size="small" icon="reuse" onClick=${() => usePicture(picture)}>${t.generate.use}<//>
				${(job.result?.loras?.length ?? 0) > 0 && html`<${Button} size="small" icon="compare" href=${href("compare", place)}>${t.generate.compare}<//>`}
				<${Button} size="small" icon="edit" href=${href("edit", place)}>${t.nav.edit}<//>
				<span class="grow"></span>
				<${Button} size="small" kind="quiet" icon="download" label=${t.actions.download} href=${image.url} download=${`${job.id}-${image.file}`} />
				<${Button} size="small" kind="quiet" icon="trash" label=${t.actions.delete} onClick=${() => removePicture(picture)} />
			</div>
			<${Details} picture=${picture} />
		</figcaption>
	</figure>`;
}

/** @param {{ picture: Picture }} props */
function Details({ picture: { job, image } }) {
	const { settings } = image;
	const loras = job.result?.loras ?? [];
	/** @type {[string, any][]} */
	const rows = [
		[t.generate.negative, settings.negative_prompt],
		[t.generate.seed, image.seed],
		[t.generate.steps, settings.steps],
		[t.generate.guidance, settings.guidance === undefined ? undefined : decimal(settings.guidance)],
		[t.generate.sampler, [settings.sampler, settings.schedule].filter(Boolean).join(", ")],
		[t.generate.clipSkip, settings.clip_skip],
		[t.generate.width, `${image.width} × ${image.height}`],
		[t.generate.model, job.model],
	];
	return html`<div class="details">
		<p class="details-prompt">${settings.prompt}</p>
		${loras.map(
			(lora) => html`<div class="row wrap details-lora">
			<span class="clip">${lora.name}</span>
			<span class="muted num">${lora.te === lora.unet ? strength(lora.unet) : `te ${strength(lora.te)}, unet ${strength(lora.unet)}`}</span>
			<span class=${lora.modules ? "badge badge-good" : "badge badge-bad"}>${t.generate.changed(lora.modules, lora.modules_in_model)}</span>
		</div>`,
		)}
		<details class="fold">
			<summary>${t.generate.details}${job.result?.seconds ? html` <span class="muted">${t.generate.made(duration(job.result.seconds))}</span>` : ""}</summary>
			<dl class="facts">
				${rows.filter(([, value]) => value !== undefined && value !== "" && value !== null).map(([label, value]) => html`<div><dt>${label}</dt><dd class="num">${value}</dd></div>`)}
			</dl>
		</details>
	</div>`;
}

export const Nothing = () => html`<${Empty} name="loom" title=${t.generate.emptyTitle} text=${t.generate.emptyText}>
	${t.generate.examples.map((example) => html`<button type="button" class="chip" onClick=${() => draft.set({ prompt: example })}>${example}</button>`)}
<//>`;
