// What was made of the picture: beside it, and over it with a handle between them.
import {app, BeforeAfter, Button, call, Empty, html, showError, texts, useState, useStore} from "../../kit.js"
import {keyOf, picturesOf, Thumbs} from "../generate/gallery.js"
import {Running} from "../generate/stage.js"
import {edit, openPicture} from "./state.js"

const t = texts.edit

/** The pictures of the jobs of this source, and the one that runs or waits. */
export function useResults() {
	const {jobs, opened} = useStore(edit)
	const ended = useStore(app).ended ?? []
	const {active} = useStore(app)
	const known = ended.some(job => job.id === opened?.id) || !opened ? ended : [...ended, opened]
	return {
		pictures: picturesOf(known.filter(job => jobs.includes(job.id))),
		current: active?.find(job => jobs.includes(job.id))
	}
}

/** @param {Picture} picture */
export const useAsSource = ({job, image}) =>
	call(image.url)
		.then(response => response.blob())
		.then(blob => openPicture(blob, image.file, {from: {job: job.id, image: String(image.index)}}))
		.catch(showError)

/** @param {{ pictures: Picture[], current?: Job }} props */
export function Result({pictures, current}) {
	const {source} = useStore(edit)
	const [chosen, setChosen] = useState(/** @type {string | null} */ (null))
	const picked = pictures.find(each => keyOf(each) === chosen)
	const shown = picked ?? (current ? undefined : pictures[0])
	if (!source) return null
	if (!shown && !current) return html`<${Empty} name="edit" title=${t.resultTitle} text=${t.resultText} />`
	return html`${
		shown
			? html`<div class="edit-compare" style=${{"--ratio": shown.image.width / shown.image.height}}>
					<${BeforeAfter}
						before=${source.url}
						after=${shown.image.url}
						beforeLabel=${t.before}
						afterLabel=${t.after}
						width=${shown.image.width}
						height=${shown.image.height}
						alt=${texts.generate.pictureOf(shown.image.settings.prompt, shown.image.seed)}
					/>
				</div>
				<div class="row wrap panel">
					<${Button} icon="edit" onClick=${() => useAsSource(shown)}>${t.useResult}<//>
					<span class="grow"></span>
					<${Button} kind="quiet" icon="download" label=${texts.actions.download} href=${shown.image.url} download=${`${shown.job.id}-${shown.image.file}`} />
				</div>`
			: current && html`<${Running} key=${current.id} job=${current} />`
	}
	${pictures.length > 1 && html`<div class="panel"><${Thumbs} pictures=${pictures} selected=${shown ? keyOf(shown) : null} onSelect=${each => setChosen(keyOf(each))} /></div>`}`
}
