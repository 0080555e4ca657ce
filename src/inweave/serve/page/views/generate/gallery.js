// The pictures of jobs that are done, newest first.
import { html } from "../../lib/dom.js";
import { loadOlder } from "../../lib/jobs.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { showError } from "../../ui/toast.js";

/**
 * @param {Job[] | null} ended
 * @returns {Picture[]}
 */
export const picturesOf = (ended) =>
	(ended ?? [])
		.filter((job) => job.operation !== "train")
		.flatMap((job) => (job.result?.images ?? []).map((image) => ({ job, image })));

/** @param {Picture} picture */
export const keyOf = ({ job, image }) => `${job.id}/${image.file}`;

/** @typedef {{ pictures: Picture[], selected: string | null, onSelect: (picture: Picture) => void }} Props */

/** @param {Props} props */
export const Thumbs = ({ pictures, selected, onSelect }) => html`<ul class="gallery-grid">
		${pictures.map((picture) => {
			const key = keyOf(picture);
			return html`<li key=${key}>
				<button type="button" class="gallery-item" aria-pressed=${key === selected ? "true" : "false"} onClick=${() => onSelect(picture)}>
					<img src=${picture.image.url} alt=${t.generate.pictureOf(picture.image.settings.prompt, picture.image.seed)} loading="lazy" width=${picture.image.width} height=${picture.image.height} />
				</button>
			</li>`;
		})}
	</ul>`;

/** @param {Props} props */
export function Gallery({ pictures, selected, onSelect }) {
	const next = useStore(app, (state) => state.endedNext);
	const ended = useStore(app, (state) => state.ended);
	const keep = useStore(app, (state) => state.capabilities?.limits.keep_hours);
	return html`<section class="gallery" aria-label=${t.generate.gallery}>
		<header class="row">
			<h2>${t.generate.gallery}</h2>
			${keep !== undefined && pictures.length > 0 && html`<span class="muted small">${t.generate.keptFor(keep)}</span>`}
		</header>
		${ended && !pictures.length && html`<p class="muted small">${t.generate.galleryEmpty}</p>`}
		<${Thumbs} pictures=${pictures} selected=${selected} onSelect=${onSelect} />
		${next !== null && html`<${Button} onClick=${() => loadOlder().catch(showError)}>${t.actions.more}<//>`}
	</section>`;
}
