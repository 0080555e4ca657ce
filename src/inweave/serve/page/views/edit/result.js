// The results of edits, over the source with a handle between them.
import {app, BeforeAfter, Button, call, Empty, html, showError, texts, useState, useStore} from "../../kit.js"
import {imagesOf, keyOf, Thumbs} from "../generate/gallery.js"
import {Running} from "../generate/stage.js"
import {edit, openImage} from "./state.js"
import {t} from "./strings.js"

/** The images of the jobs of this source, and the one that runs or waits. */
export function useResults() {
	const {jobs, opened} = useStore(edit)
	const ended = useStore(app).ended ?? []
	const {active} = useStore(app)
	const known = ended.some(job => job.id === opened?.id) || !opened ? ended : [...ended, opened]
	return {
		images: imagesOf(known.filter(job => jobs.includes(job.id))),
		current: active?.find(job => jobs.includes(job.id))
	}
}

/** @param {GalleryImage} item */
export const useAsSource = ({job, image}) =>
	call(image.url)
		.then(response => response.blob())
		.then(blob => openImage(blob, image.file, {from: {job: job.id, image: String(image.index)}}))
		.catch(showError)

/** Whether a result cannot be laid over its source: it was extended. @param {EditSource} source @param {GalleryImage} item */
const isOther = ({width, height}, {image}) => Math.abs(width / height - image.width / image.height) > 0.01

/** @param {{ images: GalleryImage[], current?: Job }} props */
export function Result({images, current}) {
	const {source} = useStore(edit)
	const [chosen, setChosen] = useState(/** @type {string | null} */ (null))
	const picked = images.find(each => keyOf(each) === chosen)
	const shown = picked ?? (current ? undefined : images[0])
	if (!source) return null
	const alt = shown && texts.generate.imageOf(shown.image.settings.prompt, shown.image.seed)
	if (!shown && !current) return html`<${Empty} name="edit" title=${t.resultTitle} text=${t.resultText} />`
	return html`${
		shown
			? html`<div class="edit-compare" style=${{"--ratio": shown.image.width / shown.image.height}}>
					${
						isOther(source, shown)
							? html`<img class="edit-larger" src=${shown.image.url} width=${shown.image.width} height=${shown.image.height} alt=${alt} />`
							: html`<${BeforeAfter}
						before=${source.url}
						after=${shown.image.url}
						beforeLabel=${t.before}
						afterLabel=${t.after}
						width=${shown.image.width}
						height=${shown.image.height}
						alt=${alt}
					/>`
					}
				</div>
				<div class="row wrap panel">
					<${Button} icon="edit" onClick=${() => useAsSource(shown)}>${t.useResult}<//>
					<span class="grow"></span>
					<${Button} kind="quiet" icon="download" label=${texts.actions.download} href=${shown.image.url} download=${`${shown.job.id}-${shown.image.file}`} />
				</div>`
			: current && html`<${Running} key=${current.id} job=${current} />`
	}
	${images.length > 1 && html`<div class="panel"><${Thumbs} images=${images} selected=${shown ? keyOf(shown) : null} onSelect=${each => setChosen(keyOf(each))} /></div>`}`
}
