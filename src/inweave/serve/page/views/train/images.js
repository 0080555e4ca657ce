// The images of a dataset by bucket, each with its crop and its caption.
import {api, Button, html, Icon, showError, Thread, texts, useEffect, useState, useStore} from "../../kit.js"
import {desk, path, removeImage, saveCaptions, stem, thumbnail} from "./state.js"
import {t} from "./strings.js"

const PAGE = 60

/** Keep the planned crops current. @param {Dataset} dataset @param {string} model @param {Fields} settings */
export function useCrops(dataset, model, settings) {
	const key = JSON.stringify([
		dataset.id,
		dataset.pictures.map(each => [each.name, each.width, each.height]),
		model,
		settings
	])
	useEffect(() => {
		const stop = new AbortController()
		const timer = setTimeout(() => {
			api(`${path(dataset.id)}/crops`, {json: {model: model || null, settings}, signal: stop.signal})
				.then(plan => desk.set({crops: new Map(plan.pictures.map((/** @type {Crop} */ each) => [each.name, each]))}))
				.catch(error => !stop.signal.aborted && showError(error))
		}, 400)
		return () => {
			clearTimeout(timer)
			stop.abort()
		}
	}, [key])
}

/** @param {{ dataset: Dataset }} props */
export function Images({dataset}) {
	const {crops} = useStore(desk)
	const [limit, setLimit] = useState(PAGE)
	const known = crops && dataset.pictures.every(each => crops.has(each.name))
	const groups = Map.groupBy(dataset.pictures, each => (known ? (crops.get(each.name)?.bucket ?? "") : "?"))
	const sorted = [...groups].sort((a, b) => b[1].length - a[1].length || a[0].localeCompare(b[0]))
	let left = limit
	return html`${sorted.map(([bucket, images]) => {
		const shown = images.slice(0, Math.max(0, left))
		left -= shown.length
		return (
			shown.length > 0 &&
			html`<section key=${bucket} class="train-bucket">
				<h3>${bucket === "?" ? t.planning : bucket ? t.bucket(bucket, images.length) : t.tooSmall(images.length)}</h3>
				<ul class="tiles train-images">
					${shown.map(each => html`<${Card} key=${each.name} dataset=${dataset} image=${each} crop=${known ? crops.get(each.name) : undefined} />`)}
				</ul>
			</section>`
		)
	})}
	${dataset.pictures.length > limit && html`<${Button} onClick=${() => setLimit(limit + PAGE)}>${texts.actions.more} (${dataset.pictures.length - limit})<//>`}`
}

/** @param {CardProps} props */
function Card({dataset, image, crop}) {
	const name = stem(image.name)
	const lost = crop?.bucket ? Math.round(100 * crop.cropped) : 0
	return html`<li class="card stack stack-2 train-card">
		<div class="train-frame" style=${{"--ratio": `${image.width} / ${image.height}`}}>
			<div class="train-crop">
				<img src=${thumbnail(dataset.id, image)} alt=${image.caption || name} loading="lazy" decoding="async" />
				${crop?.bucket && html`<span class="train-window" style=${windowOf(crop)}></span>`}
			</div>
			${!dataset.built_in && html`<${Button} kind="plain" size="small" icon="trash" class="train-remove" label=${t.remove(name)} onClick=${() => removeImage(image.name).catch(showError)} />`}
		</div>
		${crop && !crop.bucket && html`<span class="badge badge-warning">${t.tooSmallImage}</span>`}
		${lost > 0 && html`<span class=${lost > 25 ? "badge badge-warning" : "badge"}>${t.cropped(lost)}</span>`}
		<textarea
			class="input train-caption"
			rows="2"
			aria-label=${t.captionOf(name)}
			placeholder=${t.noCaption}
			readonly=${dataset.built_in}
			value=${image.caption}
			onChange=${e => {
				const text = e.currentTarget.value
				if (text !== image.caption) saveCaptions({[image.name]: text}, name).catch(showError)
			}}
		></textarea>
	</li>`
}

/** The kept part of an image, in percent of it. @param {Crop} crop */
const windowOf = ({crop: [x, y, width, height], resized: [across, down]}) => ({
	insetInlineStart: `${(100 * x) / across}%`,
	insetBlockStart: `${(100 * y) / down}%`,
	inlineSize: `${(100 * width) / across}%`,
	blockSize: `${(100 * height) / down}%`
})

export function UploadProgress() {
	const {uploads} = useStore(desk)
	if (!uploads) return null
	const {total, done, failures} = uploads
	return html`<div class="stack train-uploads" role="status">
		${done < total && html`<p class="small">${t.sending(done, total)}</p><${Thread} percent=${(100 * done) / total} label=${t.sending(done, total)} />`}
		${failures.length > 0 && html`<ul class="stack">${failures.map(each => html`<li class="field-error row"><${Icon} name="warning" /><span>${each.name}: ${each.message}</span></li>`)}</ul>`}
		${done >= total && failures.length > 0 && html`<${Button} size="small" onClick=${() => desk.set({uploads: null})}>${texts.actions.dismiss}<//>`}
	</div>`
}
