// Compare: with and without LoRAs, over strengths, pairs of LoRAs and seeds.
import {
	api,
	app,
	BeforeAfter,
	Button,
	currentParams,
	Empty,
	findModel,
	html,
	Loom,
	NumberField,
	nameOf,
	remember,
	Segmented,
	Select,
	Slider,
	showError,
	submits,
	Text,
	Thread,
	tagName,
	texts,
	useEffect,
	useRef,
	useRoute,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {cellKey, cells, run, stop} from "./compare/run.js"
import {extractTags, formAddress, formOf, formOfJob, sheetOf} from "./compare/sheet.js"
import {whyHidden} from "./generate/loras.js"

const t = texts.compare

/** @type {CompareForm | null} for a return without an address */
let last = null
const read = () => (Object.keys(currentParams()).length || !last ? formOf(currentParams()) : last)

export function View() {
	const {loras, capabilities} = useStore(app)
	const {made, left} = useStore(cells)
	const {params} = useRoute()
	const [form, setForm] = useState(read)
	last = form
	const [started, setStarted] = useState(false)
	/** @param {Partial<CompareForm>} patch */
	const change = patch => setForm(before => ({...before, ...patch}))
	useEffect(() => {
		const path = `/v1/jobs/${encodeURIComponent(params.job)}`
		if (!params.job) setForm(read())
		else api(path).then(job => setForm(formOfJob(job, Number(params.image ?? 0))), showError)
	}, [params])
	useEffect(() => remember("compare", formAddress(form)), [form])
	const base = findModel(capabilities, form.more.model)?.base
	const offered = (loras ?? []).filter(lora => !whyHidden(lora, base))
	/** one more LoRA, preferably one that is not chosen yet */
	const another = () => {
		const lora = offered.find(each => !form.loras.some(({name}) => name === tagName(each, loras))) ?? offered[0]
		return lora ? [{name: tagName(lora, loras), strength: lora.preferred_strength ?? 1}] : []
	}
	useEffect(() => {
		if (offered.length && !form.loras.length) change({loras: another()})
	}, [offered.length, form.loras.length])
	/** @param {Choice} choice */
	const choices = ({name}) => {
		const list = offered.map(each => [tagName(each, loras), each.display_name])
		return list.some(([each]) => each === name) ? list : [[name, nameOf(name)], ...list]
	}
	const sheet = sheetOf(form)
	const compare = (which = form) => {
		const next = extractTags(which)
		setForm(next)
		setStarted(true)
		run(sheetOf(next), next.mode === "without").catch(error => {
			setStarted(false)
			showError(error)
		})
	}
	useShortcuts(t.title, [
		["mod+Enter", t.run, () => compare()],
		["Escape", t.cancel, stop]
	])
	/** @param {number} index @param {Partial<Choice>} patch */
	const setLora = (index, patch) => {
		const loras = form.loras.map((each, place) =>
			place === index ? {...each, te: undefined, unet: undefined, ...patch} : each
		)
		change({loras})
		return {...form, loras}
	}
	const timer = useRef(0)
	/** @param {number} index @param {number} strength */
	const move = (index, strength) => {
		const next = setLora(index, {strength})
		clearTimeout(timer.current)
		if (started && form.mode === "without") timer.current = setTimeout(() => compare(next), 80) // it may move on
	}
	return html`<header class="view-head">
			<div>
				<h1>${t.title}</h1>
				<p>${t.text}</p>
			</div>
			<${Segmented} label=${t.mode} value=${form.mode} options=${t.modes} onChange=${mode => change({mode})} />
		</header>
		<div class="compare">
			<form class="card panel stack" onSubmit=${submits(() => compare())}>
				<${Text} label=${t.prompt} rows="3" value=${form.prompt} onChange=${prompt => change({prompt})} />
				${form.loras.map(
					(lora, index) => html`<fieldset class="compare-lora" key=${index}>
						<legend class="visually-hidden">${t.lora(index + 1)}</legend>
						<div class="compare-lora-name">
							<${Select} label=${t.lora(index + 1)} value=${lora.name} options=${choices(lora)} onChange=${name => setLora(index, {name})} />
							<${Button} kind="quiet" icon="close" label=${texts.generate.removeLora(nameOf(lora.name))} onClick=${() => change({loras: form.loras.filter((_, place) => place !== index)})} />
						</div>
						<${Slider} label=${texts.generate.strengthOf(nameOf(lora.name))} value=${lora.strength} min=${-1} max=${2} onChange=${strength => move(index, strength)} />
					</fieldset>`
				)}
				${offered.length > 0 && html`<${Button} icon="plus" onClick=${() => change({loras: [...form.loras, ...another()]})}>${t.add}<//>`}
				${loras && !offered.length && html`<p class="field-hint">${texts.generate.noLoras} <a href="#/library">${texts.nav.library}</a></p>`}
				<div class="compare-numbers">
					<${NumberField} label=${t.seed} value=${form.seed} min=${0} onChange=${seed => change({seed: seed ?? 0})} />
					<${NumberField} label=${t.steps} value=${form.steps} min=${1} max=${150} placeholder=${t.own} onChange=${steps => change({steps})} />
					${form.mode !== "without" && html`<${NumberField} label=${t.count} value=${form.count} min=${2} max=${8} onChange=${count => change({count: Math.max(2, Math.min(8, count ?? 4))})} />`}
				</div>
				${form.mode === "pairs" && form.loras.length < 2 && html`<p class="field-hint">${t.two}</p>`}
				<div class="row wrap compare-run">
					<${Button} kind="primary" type="submit" disabled=${!sheet}>${t.run}<//>
					${left > 0 && html`<${Button} onClick=${stop}>${t.cancel}<//>`}
				</div>
				${left > 0 && html`<div class="stack stack-2" role="status"><p class="muted small">${t.left(left)}</p><${Thread} percent=${null} label=${t.left(left)} /></div>`}
			</form>
			<div class="compare-result">
				${
					sheet && started
						? html`<${Sheet} sheet=${sheet} made=${made} slider=${form.mode === "without"} prompt=${form.prompt} />`
						: html`<${Empty} name="compare" title=${t.emptyTitle} text=${t.emptyText} />`
				}
			</div>
		</div>`
}

/** @param {SheetProps} props */
function Sheet({sheet, made, slider, prompt}) {
	const [kept, setKept] = useState(/** @type {any[]} */ ([]))
	const images = sheet.rows[0].map(request => made[cellKey(request)])
	const urls = images.map(each => each?.image?.url ?? each?.preview)
	const ready = slider && urls.every(Boolean)
	const size = images.find(each => each?.image)?.image ?? {width: 1, height: 1}
	useEffect(() => {
		if (ready) setKept(urls)
	}, [ready, ...urls])
	if (slider) {
		const failed = images.find(each => each?.error)
		if (failed) return html`<p class="field-error" role="alert">${failed.error}</p>`
		const [before, after] = ready ? urls : kept // the last pair stays while the next one is made
		if (!before || !after)
			return html`<div class="beforeafter" style=${{"--ratio": 1}}><${Loom} name=${prompt} percent=${35} /></div>`
		return html`<${BeforeAfter}
			before=${before}
			after=${after}
			beforeLabel=${sheet.columns[0]}
			afterLabel=${sheet.columns[1]}
			width=${size.width}
			height=${size.height}
			alt=${prompt || t.noPrompt}
		/>`
	}
	return html`<div class="compare-scroll" tabindex="0" role="region" aria-label=${t.sheet}>
		<table class="compare-sheet">
			<thead>
				<tr>
					<td></td>
					${sheet.columns.map(name => html`<th scope="col">${name}</th>`)}
				</tr>
			</thead>
			<tbody>
				${sheet.rows.map(
					(requests, row) => html`<tr>
						<th scope="row">${sheet.labels[row]}</th>
						${requests.map((request, column) => {
							const cell = made[cellKey(request)]
							return html`<td>
								${
									cell?.image
										? html`<a href=${cell.image.url} target="_blank" rel="noopener"><img src=${cell.image.url} width=${cell.image.width} height=${cell.image.height} alt=${`${sheet.labels[row]}, ${sheet.columns[column]}`} /></a>`
										: html`<div class="compare-waiting">${cell?.error && html`<span class="field-error">${cell.error}</span>`}</div>`
								}
							</td>`
						})}
					</tr>`
				)}
			</tbody>
		</table>
	</div>`
}
