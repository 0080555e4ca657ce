// The large image: the running job, or the image chosen from the gallery.
import {
	app,
	Button,
	cancelJob,
	decimal,
	deleteImage,
	duration,
	Empty,
	formatTag,
	href,
	html,
	Loom,
	nameOf,
	parseTags,
	showError,
	statusOf,
	strength,
	Thread,
	texts,
	toast,
	useStore
} from "../../kit.js"
import {draft} from "./draft.js"

const t = texts.generate

/** A job that runs or waits. @param {{ job: Job }} props */
export function Running({job}) {
	const progress = useStore(app).progress[job.id]
	const percent = progress?.total ? progress.percent : null
	const width = job.settings.width ?? 1
	const height = job.settings.height ?? 1
	return html`<figure class="stage" data-job=${job.id}>
		<div class="stage-image" style=${{"--ratio": `${width} / ${height}`}}>
			${progress?.preview ? html`<img src=${progress.preview} alt=${t.preview} />` : html`<div class="stage-cloth"><${Loom} name=${job.id} percent=${percent ?? 0} /></div>`}
		</div>
		<figcaption class="stack stage-caption">
			<${Thread} percent=${job.state === "queued" ? 0 : percent} label=${t.progress} />
			<div class="row spread">
				<span class="num">${statusOf(job, progress)}</span>
				<span class="muted num">${progress?.eta ? t.left(duration(progress.eta)) : ""}</span>
				<${Button} size="small" icon="stop" disabled=${job.cancel_requested} onClick=${() => cancelJob(job.id).catch(showError)}>${t.cancel}<//>
			</div>
		</figcaption>
	</figure>`
}

/** The settings of an image, with its LoRAs as tags in the prompt. @param {{ job: Job, image: { settings: ImageSettings } }} item */
export function promptOf({job, image}) {
	const prompt = image.settings.prompt ?? ""
	const tagged = new Set(parseTags(prompt).map(tag => tag.name))
	const others = (image.settings.loras ?? []).filter(lora => !tagged.has(lora.name ?? lora.hash ?? ""))
	const tags = others.map(lora => {
		const plain = lora.strength ?? 1
		return formatTag(lora.name ?? lora.hash ?? "", lora.te ?? plain, lora.unet ?? plain)
	})
	return {
		...image.settings,
		prompt: [prompt, ...tags].filter(Boolean).join(" "),
		loras: undefined,
		count: undefined,
		model: app.get().capabilities?.models.length === 1 ? undefined : job.model
	}
}

/** @param {GalleryImage} item */
export function reuseSettings(item) {
	draft.take(promptOf(item))
	toast(t.restored)
}

/** @param {GalleryImage} item */
export function removeImage({job, image}) {
	deleteImage(job.id, image.file).then(() => toast(t.deleted), showError)
}

/** @param {{ item: GalleryImage }} props */
export function Finished({item}) {
	const {job, image} = item
	const name = t.imageOf(image.settings.prompt, image.seed)
	const place = {job: job.id, image: image.index}
	return html`<figure class="stage" data-job=${job.id}>
		<div class="stage-image" style=${{"--ratio": `${image.width} / ${image.height}`}}>
			<img src=${image.url} width=${image.width} height=${image.height} alt=${name} />
		</div>
		<figcaption class="stack stage-caption">
			<div class="row wrap">
				<${Button} size="small" icon="reuse" onClick=${() => reuseSettings(item)}>${t.use}<//>
				${(job.result?.loras?.length ?? 0) > 0 && html`<${Button} size="small" icon="compare" href=${href("compare", place)}>${t.compare}<//>`}
				<${Button} size="small" icon="edit" href=${href("edit", place)}>${texts.nav.edit}<//>
				<span class="grow"></span>
				<${Button} size="small" kind="quiet" icon="download" label=${texts.actions.download} href=${image.url} download=${`${job.id}-${image.file}`} />
				<${Button} size="small" kind="quiet" icon="trash" label=${texts.actions.delete} onClick=${() => removeImage(item)} />
			</div>
			<${Details} item=${item} />
		</figcaption>
	</figure>`
}

/** @param {{ item: GalleryImage }} props */
function Details({item: {job, image}}) {
	const {settings} = image
	const loras = job.result?.loras ?? []
	/** @type {[string, any][]} */
	const rows = [
		[t.negative, settings.negative_prompt],
		[t.seed, image.seed],
		[t.steps, settings.steps],
		[t.guidance, settings.guidance === undefined ? undefined : decimal(settings.guidance)],
		[t.sampler, [settings.sampler, settings.schedule].filter(Boolean).join(", ")],
		[t.clip_skip, settings.clip_skip],
		[t.width, `${image.width} × ${image.height}`],
		[t.model, job.model]
	]
	return html`<div class="stack stack-2">
		<p class="details-prompt">${settings.prompt}</p>
		${loras.map(
			lora => html`<div class="row wrap details-lora">
			<span class="clip">${nameOf(lora.name)}</span>
			<span class="muted num">${lora.te === lora.unet ? strength(lora.unet) : `te ${strength(lora.te)}, unet ${strength(lora.unet)}`}</span>
			<span class=${lora.modules ? "badge badge-good" : "badge badge-bad"}>${t.changed(lora.modules, lora.modules_in_model)}</span>
		</div>`
		)}
		<details class="fold">
			<summary>${t.details}${job.result?.seconds ? html` <span class="muted">${t.made(duration(job.result.seconds))}</span>` : ""}</summary>
			<dl class="tiles facts">
				${rows.filter(([, value]) => value !== undefined && value !== "" && value !== null).map(([label, value]) => html`<div><dt>${label}</dt><dd class="num">${value}</dd></div>`)}
			</dl>
		</details>
	</div>`
}

export const Nothing = () => html`<${Empty} name="loom" title=${t.emptyTitle} text=${t.emptyText}>
	${t.examples.map(example => html`<button type="button" class="chip" onClick=${() => draft.set({prompt: example})}>${example}</button>`)}
<//>`
