// The LoRAs of the prompt as a stack of strengths, and the library as cards to add from.
import {
	addTag,
	app,
	Button,
	datasetTags,
	findLora,
	findModel,
	hasWord,
	html,
	Icon,
	LoraImage,
	moveTag,
	nameOf,
	parseTags,
	removeTag,
	Search,
	Slider,
	setTag,
	tagName,
	texts,
	toggleWord,
	triggerWords,
	useReorder,
	useState,
	useStore
} from "../../kit.js"

const t = texts.generate

/** @param {PromptProps} props */
export function Stack({prompt, onPrompt}) {
	const {loras} = useStore(app)
	const tags = parseTags(prompt)
	const [open, setOpen] = useState(/** @type {number | null} */ (null))
	const keys = tags.map(
		(tag, index) => `${tag.name} ${tags.slice(0, index).filter(each => each.name === tag.name).length}`
	)
	const reorder = useReorder(keys, (from, to) => onPrompt(moveTag(prompt, from, to)))
	if (!tags.length) return null
	return html`<ol class="stack stack-2" aria-label=${t.stack}>
		${tags.map((tag, index) => {
			const lora = findLora(loras, tag.name)
			const name = nameOf(tag.name)
			const apart = open === index || tag.te !== tag.unet
			/** @param {Partial<Tag>} patch */
			const set = patch => onPrompt(setTag(prompt, index, {te: tag.te, unet: tag.unet, ...patch}))
			const {item, grip} = reorder(index, t.reorder(name))
			return html`<li key=${keys[index]} class="lora-item" ...${item}>
				${grip}
				<span class="lora-thumb cover"><${LoraImage} lora=${lora} name=${name} /></span>
				<div class="grow">
					<div class="row">
						<span class="lora-name grow">${name}</span>
						${loras && !lora && html`<span class="badge badge-bad">${t.missing}</span>`}
						<${Button} kind="quiet" size="small" icon="sliders" label=${t.apart(name)} aria-expanded=${apart} onClick=${() => setOpen(open === index ? null : index)} />
						<${Button} kind="quiet" size="small" icon="close" label=${t.removeLora(name)} onClick=${() => onPrompt(removeTag(prompt, index))} />
					</div>
					${
						apart
							? html`<${Slider} label=${t.textEncoder} min=${-1} max=${2} value=${tag.te} onChange=${te => set({te})} />
								<${Slider} label=${t.denoiser} min=${-1} max=${2} value=${tag.unet} onChange=${unet => set({unet})} />`
							: html`<${Slider} label=${t.strengthOf(name)} hideLabel min=${-1} max=${2} value=${tag.unet} onChange=${value => set({te: value, unet: value})} />`
					}
				</div>
			</li>`
		})}
	</ol>`
}

/** Trigger words of the LoRAs in the prompt, and apart from them the tags of their datasets. @param {PromptProps} props */
export function Triggers(props) {
	const {loras} = useStore(app)
	const used = parseTags(props.prompt).flatMap(tag => findLora(loras, tag.name) ?? [])
	const words = [...new Set(used.flatMap(triggerWords))]
	const tags = [...new Set(used.flatMap(datasetTags))]
	return html`${words.length > 0 && html`<${Words} ...${props} words=${words} label=${t.triggers} />`}
		${tags.length > 0 && html`<details class="fold triggers"><summary>${t.datasetTags}</summary><${Words} ...${props} words=${tags} label=${t.datasetTags} /></details>`}`
}

/** A click adds or removes a word. @param {PromptProps & { words: string[], label: string }} props */
function Words({prompt, onPrompt, words, label}) {
	const [all, setAll] = useState(false)
	const visible = all ? words : words.slice(0, 8)
	return html`<div class="row wrap triggers" role="group" aria-label=${label}>
		${visible.map(
			word => html`<button key=${word} type="button" class="chip" aria-pressed=${hasWord(prompt, word)} onClick=${() => onPrompt(toggleWord(prompt, word))}>
			<span class="clip">${word}</span>
		</button>`
		)}
		${words.length > 8 && html`<button type="button" class="chip" onClick=${() => setAll(!all)}>${all ? t.fewer : t.moreWords(words.length - 8)}</button>`}
	</div>`
}

/** Why a LoRA is not offered for a model; null if it is. @param {Lora} lora @param {string | null | undefined} base */
export function whyHidden(lora, base) {
	if (lora.error) return t.unreadable
	if (base && lora.base && lora.base !== base) return t.madeFor(lora.base)
	return null
}

/** Both ends of a long name: what files of one series differ in is often the last part. @param {string} name */
const shortened = name => (name.length > 34 ? `${name.slice(0, 14)}…${name.slice(-16)}` : name)

/** @param {PromptProps & { model?: string }} props */
export function Picker({prompt, onPrompt, model}) {
	const {loras, capabilities} = useStore(app)
	const [query, setQuery] = useState("")
	const [everything, setEverything] = useState(false)
	const [limit, setLimit] = useState(24)
	const base = findModel(capabilities, model)?.base
	const tags = parseTags(prompt)
	const text = query.trim().toLowerCase()
	const matches = (loras ?? []).filter(
		lora =>
			!text ||
			[lora.display_name, lora.alias, lora.title, lora.description, lora.path, ...triggerWords(lora)].some(field =>
				field?.toLowerCase().includes(text)
			)
	)
	const hidden = matches.filter(lora => whyHidden(lora, base))
	const shown = everything ? matches : matches.filter(lora => !whyHidden(lora, base))
	const reasons = Object.entries(Object.groupBy(hidden, lora => /** @type {string} */ (whyHidden(lora, base)))).map(
		([reason, list]) => `${list?.length} ${reason}`
	)
	return html`<div class="stack lora-picker scrolls">
		${
			(loras?.length ?? 0) > 4 &&
			html`<${Search} id="lora-search" placeholder=${t.search} aria-label=${t.search} value=${query} onChange=${setQuery} />`
		}
		${loras?.length === 0 && html`<p class="muted small">${t.noLoras} <a href="#/library">${texts.nav.library}</a></p>`}
		<ul class="tiles lora-cards">
			${shown.slice(0, limit).map(lora => {
				const index = tags.findIndex(tag => findLora(loras, tag.name)?.id === lora.id)
				const why = whyHidden(lora, base)
				return html`<li key=${lora.id}>
					<button
						type="button"
						class="lora-card"
						aria-pressed=${index >= 0}
						disabled=${Boolean(lora.error)}
						aria-label=${[lora.display_name, why].filter(Boolean).join(", ")}
						title=${[lora.display_name, lora.description, why].filter(Boolean).join("\n")}
						onClick=${() => onPrompt(index >= 0 ? removeTag(prompt, index) : addTag(prompt, tagName(lora, loras), lora.preferred_strength ?? 1))}
					>
						<span class="lora-card-image cover"><${LoraImage} lora=${lora} name=${lora.name} /></span>
						<span class="lora-card-name">${shortened(lora.display_name)}</span>
						${why && html`<span class="lora-card-why clip">${why}</span>`}
						${index >= 0 && html`<span class="lora-card-check"><${Icon} name="check" /></span>`}
					</button>
				</li>`
			})}
		</ul>
		${shown.length > limit && html`<${Button} size="small" onClick=${() => setLimit(limit + 48)}>${t.moreLoras(shown.length - limit)}<//>`}
		${
			hidden.length > 0 &&
			html`<p class="small muted">
			${everything ? t.allShown : t.hidden(hidden.length, reasons.join(", "))}
			${" "}<button type="button" class="link" onClick=${() => setEverything(!everything)}>${everything ? t.hideAgain : t.showAll}</button>
		</p>`
		}
	</div>`
}
