// Train: datasets and runs; one dataset with the form of a run; one run.
import {
	ago,
	api,
	app,
	Button,
	Confirm,
	DropZone,
	Empty,
	href,
	html,
	navigate,
	Swatch,
	showError,
	Thread,
	texts,
	toast,
	useEffect,
	usePageDrop,
	useRoute,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {BulkCaptions} from "./train/captions.js"
import {Images, UploadProgress, useCrops} from "./train/images.js"
import {Pad} from "./train/pad.js"
import {Run} from "./train/run.js"
import {Setup, useForm} from "./train/setup.js"
import {
	addFiles,
	changeForm,
	createDataset,
	desk,
	openDataset,
	path,
	saveCaptions,
	thumbnail,
	undoCaptions
} from "./train/state.js"
import {t} from "./train/strings.js"

const ACCEPT = "image/png,image/jpeg,image/webp,image/bmp,.txt,.caption"

export function View() {
	const {params} = useRoute()
	const trains = useStore(app).capabilities?.operations.includes("train") ?? true
	if (!trains) return html`<${Empty} name="train" title=${t.title} text=${t.never} />`
	if (params.job) return html`<${Run} key=${params.job} id=${params.job} />`
	if (params.dataset) return html`<${Workspace} key=${params.dataset} id=${params.dataset} />`
	return html`<${Home} />`
}

function Home() {
	const [datasets, setDatasets] = useState(/** @type {any[] | null} */ (null))
	const [drawing, setDrawing] = useState(false)
	useEffect(() => {
		api("/v1/datasets")
			.then(answer => setDatasets(answer.datasets))
			.catch(showError)
	}, [])
	const own = datasets?.filter(each => !each.built_in) ?? []
	/** @param {File[]} files */
	const create = async files => {
		const {id} = await createDataset(t.newName(own.length + 1))
		navigate("train", {dataset: id})
		await openDataset(id)
		await addFiles(id, files)
	}
	/** @param {File[]} files */
	const drop = files => create(files).catch(showError)
	const veil = usePageDrop(drop, t.drop)
	const examples = datasets?.filter(each => each.built_in) ?? []
	return html`<header class="view-head"><div><h1>${t.title}</h1><p>${t.text}</p></div></header>
		<div class="train-first">
			<${DropZone} onFiles=${drop} accept=${ACCEPT} label=${t.drop} hint=${t.dropHint} multiple icon="image" />
			<div class="card panel stack train-draw">
				<div class="train-draw-cloth"><${Swatch} name="drawing" size=${12} /></div>
				<p>${t.drawText}</p>
				<${Button} kind=${own.length ? "plain" : "primary"} icon="edit" onClick=${() => setDrawing(true)}>${t.draw}<//>
			</div>
		</div>
		<${Runs} />
		${own.length > 0 && html`<${Datasets} title=${t.datasets} list=${own} />`}
		${examples.length > 0 && html`<${Datasets} title=${t.examples} list=${examples} />`}
		${drawing && html`<${Drawing} onClose=${() => setDrawing(false)} />`}
		${veil}`
}

/** @param {{ dataset?: string, onClose: () => void }} props  drawings go to the dataset one by one; it is created if missing */
function Drawing({dataset, onClose}) {
	const [id, setId] = useState(dataset ?? "")
	const [added, setAdded] = useState(0)
	/** @type {PadProps["onAdd"]} */
	const add = async (blob, caption) => {
		const target = id || (await createDataset(t.pad.name)).id
		if (!id) {
			setId(target)
			changeForm(target, {preset: "quick"})
		}
		const stamp = `${t.pad.file} ${String(Date.now()).slice(-8)}.png`
		await addFiles(target, [new File([blob], stamp, {type: "image/png"})])
		const stored = desk.get().dataset?.pictures.find(each => each.name === stamp)
		if (stored) await saveCaptions({[stamp]: caption}, caption)
		setAdded(added + 1)
	}
	const close = () => {
		onClose()
		if (id && !dataset) navigate("train", {dataset: id})
	}
	return html`<${Pad} onAdd=${add} onClose=${close} added=${added} />`
}

/** @param {{ title: string, list: any[] }} props */
const Datasets = ({title, list}) => html`<section class="train-section">
	<h2>${title}</h2>
	<ul class="tiles">
		${list.map(
			each => html`<li key=${each.id}><a class="card train-dataset" href=${href("train", {dataset: each.id})}>
				<span class="train-cover cover">${each.first ? html`<img src=${thumbnail(each.id, {name: each.first, modified: each.created})} alt="" loading="lazy" />` : html`<${Swatch} name=${each.id} />`}</span>
				<span class="clip">${each.name}</span>
				<span class="muted small">${t.count(each.pictures)}</span>
			</a></li>`
		)}
	</ul>
</section>`

function Runs() {
	const {active, ended, progress} = useStore(app)
	const runs = [...(active ?? []), ...(ended ?? [])].filter(job => job.operation === "train").slice(0, 12)
	if (!runs.length) return null
	return html`<section class="train-section">
		<h2>${t.runs}</h2>
		<ul class="stack">
			${runs.map(
				job => html`<li key=${job.id}><a class="card row train-runs" href=${href("train", {job: job.id})}>
					<span class="grow clip">${String(job.settings.name ?? "")}</span>
					${job.state === "running" && html`<span class="grow"><${Thread} percent=${progress[job.id]?.percent ?? null} label=${texts.generate.progress} /></span>`}
					<span class="badge">${t.run.states[job.state]}</span>
					<span class="muted small">${ago(job.finished ?? job.created)}</span>
				</a></li>`
			)}
		</ul>
	</section>`
}

/** @param {{ id: string }} props */
function Workspace({id}) {
	const {dataset} = useStore(desk)
	const {online} = useStore(app)
	const [gone, setGone] = useState("")
	const current = dataset?.id === id ? dataset : null
	useEffect(() => {
		openDataset(id).catch(error => error.status && setGone(error.message))
	}, [id, online])
	if (gone && !current)
		return html`<${Empty} name=${id} title=${t.gone} text=${gone}><${Button} href=${href("train")}>${t.run.back}<//><//>`
	return current ? html`<${Desk} dataset=${current} />` : html`<h1 class="visually-hidden">${t.title}</h1>`
}

/** @param {{ dataset: Dataset }} props */
function Desk({dataset}) {
	const form = useForm(dataset)
	const [asking, setAsking] = useState(false)
	const [drawing, setDrawing] = useState(false)
	const {resolution} = form.overrides
	useCrops(dataset, form.model, resolution >= 16 ? {resolution} : {})
	/** @param {File[]} files */
	const add = files => {
		if (dataset.built_in) toast(t.fixed, {kind: "warning"})
		else addFiles(dataset.id, files).catch(showError)
	}
	const veil = usePageDrop(add, t.add)
	const undo = () => undoCaptions().catch(showError)
	useShortcuts(t.title, [["u", t.captions.undoKey, undo]])
	/** @param {{ currentTarget: HTMLInputElement }} event */
	const rename = event =>
		api(path(dataset.id), {method: "PATCH", json: {name: event.currentTarget.value}})
			.then(answer => desk.set({dataset: answer}))
			.catch(showError)
	const remove = () =>
		api(path(dataset.id), {method: "DELETE"})
			.then(() => navigate("train"))
			.catch(showError)
	return html`<header class="view-head">
			<div class="grow">
				<h1 class="visually-hidden">${t.title}: ${dataset.name}</h1>
				<p class="small"><a class="train-back" href=${href("train")}>${t.title}</a></p>
				<input class="train-name" aria-label=${t.name} value=${dataset.name} readonly=${dataset.built_in} maxlength="200" onChange=${rename} />
				<p>${t.count(dataset.pictures.length)}</p>
			</div>
			<${Button} size="small" class="train-jump" icon="sliders" onClick=${() => document.querySelector(".train-setup")?.scrollIntoView()}>${t.toRun}<//>
			${!dataset.built_in && html`<${Button} kind="quiet" icon="trash" label=${t.delete} onClick=${() => setAsking(true)} />`}
		</header>
		<div class="train-desk">
			<div class="stack train-left">
				${
					!dataset.built_in &&
					html`<div class="row wrap train-add">
						<${DropZone} onFiles=${add} accept=${ACCEPT} label=${t.add} multiple compact icon="image" />
						<${Button} icon="edit" onClick=${() => setDrawing(true)}>${t.draw}<//>
					</div>`
				}
				<${UploadProgress} />
				${!dataset.built_in && dataset.pictures.length > 0 && html`<${BulkCaptions} />`}
				${dataset.pictures.length ? html`<${Images} dataset=${dataset} />` : html`<${Empty} name=${dataset.id} title=${t.emptyTitle} text=${t.emptyText} />`}
			</div>
			<${Setup} dataset=${dataset} form=${form} />
		</div>
		${asking && html`<${Confirm} title=${t.deleteTitle(dataset.name)} text=${t.deleteText} confirm=${texts.actions.delete} onConfirm=${remove} onClose=${() => setAsking(false)} />`}
		${drawing && html`<${Drawing} dataset=${dataset.id} onClose=${() => setDrawing(false)} />`}
		${!dataset.built_in && veil}`
}
