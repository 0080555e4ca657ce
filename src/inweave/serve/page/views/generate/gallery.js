// The images of jobs that are done, newest first.
import {app, Button, html, loadOlder, showError, texts, useStore} from "../../kit.js"

const t = texts.generate

/** @param {Job[] | null} ended @returns {GalleryImage[]} */
export const imagesOf = ended =>
	(ended ?? [])
		.filter(job => job.operation !== "train")
		.flatMap(job => (job.result?.images ?? []).map(image => ({job, image})))

/** @param {GalleryImage} item */
export const keyOf = ({job, image}) => `${job.id}/${image.file}`

/** @param {GalleryProps} props */
export const Thumbs = ({images, selected, onSelect}) => html`<ul class="tiles gallery-grid">
		${images.map(item => {
			const key = keyOf(item)
			return html`<li key=${key}>
				<button type="button" class="gallery-item cover" aria-pressed=${key === selected} onClick=${() => onSelect(item)}>
					<img src=${item.image.url} alt=${t.imageOf(item.image.settings.prompt, item.image.seed)} loading="lazy" width=${item.image.width} height=${item.image.height} />
				</button>
			</li>`
		})}
	</ul>`

/** @param {GalleryProps} props */
export function Gallery({images, selected, onSelect}) {
	const {endedNext: next, ended} = useStore(app)
	const keep = useStore(app).capabilities?.limits.keep_hours
	return html`<section class="stack gallery" aria-label=${t.gallery}>
		<header class="row">
			<h2>${t.gallery}</h2>
			${keep !== undefined && images.length > 0 && html`<span class="muted small">${t.keptFor(keep)}</span>`}
		</header>
		${ended && !images.length && html`<p class="muted small">${t.galleryEmpty}</p>`}
		<${Thumbs} images=${images} selected=${selected} onSelect=${onSelect} />
		${next !== null && html`<${Button} onClick=${() => loadOlder().catch(showError)}>${texts.actions.more}<//>`}
	</section>`
}
