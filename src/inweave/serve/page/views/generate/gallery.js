// The newest images: those of the worker's gallery, and those of jobs that ended since it was read.
import {
	api,
	app,
	Button,
	createStore,
	href,
	html,
	loadOlder,
	showError,
	texts,
	toast,
	useEffect,
	useStore
} from "../../kit.js"

const t = texts.generate
const PAGE = 60

/** The images of jobs that are done, newest first. @param {Job[] | null} ended @returns {GalleryImage[]} */
export const imagesOf = ended =>
	(ended ?? [])
		.filter(job => job.operation !== "train")
		.flatMap(job => (job.result?.images ?? []).map(image => ({job, image})))

/** @param {GalleryImage} item */
export const keyOf = ({job, image}) => image.gallery ?? `${job.id}/${image.file}`

/** The page and the job of an image, for links: a job that is forgotten is not needed. @param {GalleryImage} item @returns {Query} */
export const placeOf = ({job, image, row}) =>
	row && !job.result?.images.length ? {gallery: row.id} : {job: job.id, image: image.index}

/** @type {Store<{ rows: GalleryRow[] | null, next: string | null, known: Set<string> }>} */
const history = createStore({
	rows: /** @type {GalleryRow[] | null} */ (null), // null until loaded
	next: /** @type {string | null} */ (null),
	known: new Set() // jobs that had ended when the rows were loaded
})

/** @param {string} [cursor] */
async function load(cursor) {
	const known = new Set(app.get().ended?.map(job => job.id))
	/** @type {{ images: GalleryRow[], next: string | null }} */
	const {images, next} = await api("/v1/gallery", {query: {limit: PAGE, cursor}})
	const before = history.get().rows ?? []
	if (cursor) history.set({rows: [...before, ...images], next})
	else {
		const older = next === null ? [] : before.filter(row => row.created < (images.at(-1)?.created ?? 0))
		history.set({rows: [...images, ...older], next: older.length ? history.get().next : next, known})
	}
}

/**
 * Move images into the trash, from which a message can restore them.
 * @param {string[]} images @param {() => unknown} [restored]
 */
export async function trash(images, restored) {
	await api("/v1/gallery/delete", {json: {images}})
	history.set(({rows}) => ({rows: rows?.filter(row => !images.includes(row.id)) ?? null}))
	await load()
	const run = () =>
		api("/v1/gallery/restore", {json: {images}})
			.then(() => Promise.all([load(), restored?.()]))
			.catch(showError)
	toast(t.trashed(images.length), {action: {label: texts.actions.undo, run}})
}

/** @param {Job[] | null} ended @param {{ rows: GalleryRow[] | null, known: Set<string> }} state @returns {GalleryImage[]} */
function joined(ended, {rows, known}) {
	const jobs = new Map(ended?.map(job => [job.id, job]))
	const stored = new Set(rows?.map(row => row.id))
	const own = imagesOf(ended).filter(
		({job, image}) => !image.gallery || (!known.has(job.id) && !stored.has(image.gallery))
	)
	const items = (rows ?? []).map(row => {
		const job = jobs.get(row.job ?? "")
		const image = job?.result?.images.find(each => each.gallery === row.id)
		return job && image ? {job, image: {...image, url: row.url}, row} : itemOf(row)
	})
	/** @param {GalleryImage} item */
	const time = ({job, row}) => row?.created ?? job.finished ?? job.created
	return [...own, ...items].sort((a, b) => time(b) - time(a))
}

/** An image whose job has expired, as far as its row says. @param {GalleryRow} row @returns {GalleryImage} */
const itemOf = row => ({
	job: /** @type {any} */ ({id: row.job ?? row.id, model: row.model, result: {images: [], loras: []}}),
	image: {
		index: row.place,
		seed: /** @type {any} */ (row.seed),
		settings: {prompt: row.prompt, negative_prompt: row.negative_prompt},
		width: row.width,
		height: row.height,
		file: row.name,
		url: row.url,
		gallery: row.id
	},
	row
})

/** The images to show, kept up to date. */
export function useImages() {
	const {ended, capabilities, endedNext} = useStore(app)
	const {rows, next, known} = useStore(history)
	const enabled = capabilities?.features.includes("gallery")
	useEffect(() => {
		if (enabled && ended)
			load().catch(error => {
				history.set(state => ({rows: state.rows ?? []})) // those of jobs are shown
				showError(error)
			})
	}, [enabled, ended])
	const loaded = ended !== null && capabilities !== null && (!enabled || rows !== null)
	const more = enabled ? next && (() => load(next)) : endedNext !== null && loadOlder
	return {images: loaded ? joined(ended, {rows, known}) : [], loaded, older: more || null}
}

/** @param {GalleryProps} props */
export const Thumbs = ({images, selected, onSelect}) => html`<ul class="tiles gallery-grid">
		${images.map(item => {
			const key = keyOf(item)
			return html`<li key=${key}>
				<button type="button" class="gallery-item cover" aria-pressed=${key === selected} onClick=${() => onSelect(item)}>
					<img src=${item.row?.thumbnail ?? item.image.url} alt=${t.imageOf(item.image.settings.prompt, item.image.seed)} loading="lazy" width=${item.image.width} height=${item.image.height} />
				</button>
			</li>`
		})}
	</ul>`

/** @param {GalleryProps & { older?: (() => Promise<unknown>) | null }} props */
export function Gallery({images, selected, onSelect, older = null}) {
	const {capabilities} = useStore(app)
	const keeps = capabilities?.features.includes("gallery")
	return html`<section class="stack gallery" aria-label=${t.gallery}>
		<header class="row">
			<h2>${t.gallery}</h2>
			${capabilities && images.length > 0 && (keeps ? html`<a class="small" href=${href("gallery")}>${t.all}</a>` : html`<span class="muted small">${t.keptFor(capabilities.limits.keep_hours)}</span>`)}
		</header>
		${!images.length && html`<p class="muted small">${t.galleryEmpty}</p>`}
		<${Thumbs} images=${images} selected=${selected} onSelect=${onSelect} />
		${older && html`<${Button} onClick=${() => older().catch(showError)}>${texts.actions.more}<//>`}
	</section>`
}
