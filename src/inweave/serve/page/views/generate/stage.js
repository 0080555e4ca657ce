// The large image: the running job, or the image chosen from the gallery.
import {
	api,
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
	navigate,
	parseTags,
	showError,
	statusOf,
	strength,
	Thread,
	texts,
	toast,
	useEffect,
	useState,
	useStore
} from "../../kit.js"
import {draft} from "./draft.js"
import {keyOf, placeOf, trash} from "./gallery.js"
import {settingsOf, takeMetadata} from "./metadata.js"

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

/** The settings of an image, with its LoRAs as tags in the prompt. @param {{ job: Job, image: { settings: ImageSettings, grid?: string[] } }} item */
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
		grid: image.grid,
		prompt: [prompt, ...tags].filter(Boolean).join(" "),
		loras: undefined,
		count: undefined,
		model: app.get().capabilities?.models.length === 1 ? undefined : job.model
	}
}

/** Whether the job of an image has expired: its settings are in the image alone. @param {GalleryImage} item */
const isAlone = item => !item.job.result?.images.length

/** What is stored in an image of the gallery. @param {string} id @returns {Promise<ImageMetadata>} */
export const metadataOf = id => api(`/v1/gallery/${id}/settings`)

/** @param {GalleryImage} item */
export function reuseSettings(item) {
	if (item.row && isAlone(item)) return metadataOf(item.row.id).then(takeMetadata, showError)
	draft.take(promptOf(item))
	toast(t.restored)
}

/** @param {GalleryImage} item */
export function removeImage({job, image}) {
	if (image.gallery) trash([image.gallery]).catch(showError)
	else deleteImage(job.id, image.file).then(() => toast(t.deleted), showError)
}

/** The parameters of Compare for an image of the gallery. @param {string} id */
export const compareImage = id =>
	metadataOf(id)
		.then(settingsOf)
		.then(settings => navigate("compare", settings), showError)

/** @param {{ item: GalleryImage, onStep?: (by: number) => void }} props onStep: shows another image */
export function Finished({item, onStep = () => {}}) {
	const [viewer, setViewer] = useState(/** @type {any} */ (null))
	const open = () => import("./viewer.js").then(setViewer, showError)
	const {job, image} = item
	const name = t.imageOf(image.settings.prompt, image.seed)
	const place = placeOf(item)
	const compared = place.gallery ? {onClick: () => compareImage(String(place.gallery))} : {href: href("compare", place)}
	const woven = item.row?.loras.length ?? job.result?.loras?.length ?? 0
	return html`<figure class="stage" data-job=${job.id}>
		<div class="stage-image" style=${{"--ratio": `${image.width} / ${image.height}`}}>
			<img src=${image.url} width=${image.width} height=${image.height} alt=${name} onClick=${open} />
		</div>
		${viewer && html`<${viewer.Viewer} item=${item} name=${name} onStep=${onStep} onClose=${() => setViewer(null)} />`}
		<figcaption class="stack stage-caption">
			<div class="row wrap">
				<${Button} size="small" icon="reuse" onClick=${() => reuseSettings(item)}>${t.use}<//>
				${woven > 0 && html`<${Button} size="small" icon="compare" ...${compared}>${t.compare}<//>`}
				<${Button} size="small" icon="edit" href=${href("edit", place)}>${texts.nav.edit}<//>
				<span class="grow"></span>
				<${Button} size="small" kind="quiet" icon="expand" label=${t.fullScreen} onClick=${open} />
				<${Button} size="small" kind="quiet" icon="download" label=${texts.actions.download} href=${image.url} download=${item.row?.name ?? `${job.id}-${image.file}`} />
				<${Button} size="small" kind="quiet" icon="trash" label=${texts.actions.delete} onClick=${() => removeImage(item)} />
			</div>
			<${Details} key=${keyOf(item)} item=${item} />
		</figcaption>
	</figure>`
}

/** @param {{ item: GalleryImage }} props */
function Details({item}) {
	const {job, image, row} = item
	const [stored, setStored] = useState(/** @type {ImageMetadata | null} */ (null))
	useEffect(() => {
		// an image without settings is shown without them
		if (row && isAlone(item)) metadataOf(row.id).then(setStored, () => {})
	}, [row?.id])
	/** @type {ImageSettings} */
	const settings = {...image.settings, ...stored?.settings}
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
