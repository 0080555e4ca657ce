// The pictures of jobs that are done, newest first.
import {app, Button, html, loadOlder, showError, texts, useStore} from "../../kit.js"

const t = texts.generate

/** @param {Job[] | null} ended @returns {Picture[]} */
export const picturesOf = ended =>
	(ended ?? [])
		.filter(job => job.operation !== "train")
		.flatMap(job => (job.result?.images ?? []).map(image => ({job, image})))

/** @param {Picture} picture */
export const keyOf = ({job, image}) => `${job.id}/${image.file}`

/** @param {GalleryProps} props */
export const Thumbs = ({pictures, selected, onSelect}) => html`<ul class="gallery-grid">
		${pictures.map(picture => {
			const key = keyOf(picture)
			return html`<li key=${key}>
				<button type="button" class="gallery-item cover" aria-pressed=${key === selected} onClick=${() => onSelect(picture)}>
					<img src=${picture.image.url} alt=${t.pictureOf(picture.image.settings.prompt, picture.image.seed)} loading="lazy" width=${picture.image.width} height=${picture.image.height} />
				</button>
			</li>`
		})}
	</ul>`

/** @param {GalleryProps} props */
export function Gallery({pictures, selected, onSelect}) {
	const {endedNext: next, ended} = useStore(app)
	const keep = useStore(app).capabilities?.limits.keep_hours
	return html`<section class="stack gallery" aria-label=${t.gallery}>
		<header class="row">
			<h2>${t.gallery}</h2>
			${keep !== undefined && pictures.length > 0 && html`<span class="muted small">${t.keptFor(keep)}</span>`}
		</header>
		${ended && !pictures.length && html`<p class="muted small">${t.galleryEmpty}</p>`}
		<${Thumbs} pictures=${pictures} selected=${selected} onSelect=${onSelect} />
		${next !== null && html`<${Button} onClick=${() => loadOlder().catch(showError)}>${texts.actions.more}<//>`}
	</section>`
}
