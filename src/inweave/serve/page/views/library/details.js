// Details of one LoRA: metadata, compatibility, hashes, and conversion to other dialects.
import {
	address,
	ago,
	api,
	app,
	Button,
	bytes,
	Check,
	Confirm,
	Dialog,
	datasetTags,
	formatTag,
	href,
	html,
	LoraImage,
	loadLoras,
	navigate,
	printable,
	Select,
	showError,
	submits,
	tagName,
	texts,
	toast,
	triggerWords,
	useBusy,
	useEffect,
	useState,
	useStore
} from "../../kit.js"
import {Fit} from "./fit.js"
import {SampleOf} from "./samples.js"
import {t} from "./strings.js"

/** @param {DetailsProps} props */
export function Details({id, twins, onClose}) {
	const [lora, setLora] = useState(/** @type {LoraDetails | null} */ (null))
	const [asking, setAsking] = useState(false)
	const reload = () =>
		api(`/v1/loras/${encodeURIComponent(id)}`).then(setLora, error => {
			showError(error)
			onClose()
		})
	useEffect(() => {
		reload()
	}, [id])
	if (!lora) return null
	const strength = lora.preferred_strength ?? 1
	const same = (twins.get(lora.id) ?? []).filter(each => each.id !== lora.id)
	const remove = () =>
		api(`/v1/loras/${lora.id}`, {method: "DELETE"})
			.then(() => {
				toast(t.deleted(lora.display_name))
				onClose()
				return loadLoras()
			})
			.catch(showError)
	return html`<${Dialog} title=${lora.display_name} onClose=${onClose} wide>
		<div class="library-details">
			<div class="library-detail-image cover"><${LoraImage} lora=${lora} name=${lora.name} /></div>
			<div class="stack grow">
				${lora.description && html`<p>${lora.description}</p>`}
				<${Facts} lora=${lora} />
				<div class="row wrap">
					<${Button} kind="primary" onClick=${() => navigate("generate", {prompt: formatTag(tagName(lora, app.get().loras), strength, strength)})}>${t.use}<//>
					<${Button} icon="download" href=${address(`/v1/loras/${lora.id}/file`)} download>${texts.actions.download}<//>
					${lora.removable && html`<${Button} kind="danger" icon="trash" onClick=${() => setAsking(true)}>${texts.actions.delete}<//>`}
				</div>
			</div>
		</div>
		${
			lora.health.length > 0 &&
			html`<section>
				<h3>${t.health}</h3>
				<ul class="library-problems">${lora.health.map(line => html`<li>${line}</li>`)}</ul>
			</section>`
		}
		${
			same.length > 0 &&
			html`<section>
				<h3>${t.sameContents}</h3>
				<p class="row wrap">${same.map(each => html`<a href=${href("library", {lora: each.id})}>${printable(each.path)}</a>`)}</p>
			</section>`
		}
		<${Words} list=${triggerWords(lora)} title=${t.triggers} />
		<${SampleOf} lora=${lora} onChange=${reload} />
		<${Words} list=${datasetTags(lora)} title=${t.datasetTags} hint=${t.datasetHint} />
		<${Fit} lora=${lora} />
		<${Convert} lora=${lora} />
		<${Hashes} lora=${lora} />
		${
			Object.keys(lora.metadata).length > 0 &&
			html`<details class="fold">
				<summary>${t.metadata(Object.keys(lora.metadata).length)}</summary>
				<dl class="library-metadata">
					${Object.entries(lora.metadata).map(([name, value]) => html`<div><dt>${name}</dt><dd class="mono">${String(value).slice(0, 2000)}</dd></div>`)}
				</dl>
			</details>`
		}
		${asking && html`<${Confirm} title=${t.deleteTitle(lora.display_name)} text=${t.deleteText} confirm=${texts.actions.delete} onConfirm=${remove} onClose=${() => setAsking(false)} />`}
	<//>`
}

/** @param {Lora} lora */
export const algorithm = lora =>
	[lora.algorithms.slice(0, 2).join(", "), lora.ranks.length ? t.rank(lora.ranks) : ""].filter(Boolean).join(" ")

/** @param {{ lora: LoraDetails }} props */
function Facts({lora}) {
	const rows = [
		[t.base, lora.base ? `${lora.base} (${t.sure(Math.round(lora.confidence * 100))})` : t.unknownBase],
		[t.algorithm, algorithm(lora)],
		[t.inside, t.modules(lora.modules, lora.tensors, lora.dtypes.join(", "))],
		[t.written, lora.dialects.join(", ")],
		[t.file, `${printable(lora.path)}, ${bytes(lora.size)}, ${ago(lora.modified)}`],
		[t.preferred, lora.preferred_strength ?? ""],
		[t.notes, lora.notes ?? ""]
	]
	return html`<dl class="library-facts">
		${rows.filter(([, value]) => value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
	</dl>`
}

/** @param {string} text */
const copy = text =>
	navigator.clipboard?.writeText(text).then(
		() => toast(t.copied(text)),
		() => toast(t.notCopied, {kind: "warning"})
	) ?? toast(t.notCopied, {kind: "warning"})

/** Words to copy. @param {{ list: string[], title: string, hint?: string }} props */
function Words({list, title, hint}) {
	return (
		list.length > 0 &&
		html`<section>
			<h3>${title}</h3>
			${hint && html`<p class="muted small library-hint">${hint}</p>`}
			<p class="row wrap">
				${list.slice(0, 40).map(word => html`<button type="button" class="chip" title=${t.copy} onClick=${() => copy(word)}>${word}</button>`)}
				${list.length > 40 && html`<span class="muted small">${t.moreWords(list.length - 40)}</span>`}
			</p>
		</section>`
	)
}

/** @param {{ lora: Lora }} props */
const Hashes = ({lora}) => html`<section>
	<h3>${t.hashes}</h3>
	${
		lora.hashes
			? html`<dl class="library-facts">
					${Object.entries(lora.hashes)
						.filter(([, hash]) => hash)
						.map(
							([name, hash]) => html`<div>
								<dt>${t.hashNames[name] ?? name}</dt>
								<dd><button type="button" class="library-hash mono" title=${t.copy} onClick=${() => copy(String(hash))}>${hash}</button></dd>
							</div>`
						)}
				</dl>`
			: html`<p class="muted">${t.notHashed}</p>`
	}
</section>`

/** @param {{ lora: Lora }} props */
function Convert({lora}) {
	const dialects = useStore(app).capabilities?.dialects ?? []
	const [to, setTo] = useState("kohya")
	const [drop, setDrop] = useState(false)
	const [busy, during] = useBusy()
	const [result, setResult] = useState(/** @type {any} */ (null))
	const convert = () => {
		setResult(null)
		const answer = api("/v1/loras/convert", {json: {lora: lora.id, to, drop}})
		during(answer.catch(error => ({error: error.message})).then(setResult))
	}
	return html`<section>
		<h3>${t.convert}</h3>
		<form class="library-form" onSubmit=${submits(convert)}>
			<${Select}
				label=${t.dialect}
				value=${to}
				options=${dialects.map(each => [each, t.dialects[each] ?? each])}
				onChange=${setTo}
			/>
			<${Check} label=${t.leaveOut} checked=${drop} onChange=${setDrop} />
			<${Button} type="submit" busy=${busy}>${t.convertAction}<//>
		</form>
		<div role="status">
			${
				result &&
				(result.error
					? html`<p class="field-error library-lines">${result.error}</p>`
					: html`<div class="library-answer">
							<${Button} kind="primary" icon="download" href=${result.url} download=${result.file}>${t.downloadAs(result.file, bytes(result.bytes))}<//>
							${[...result.notes, ...result.warnings].map(line => html`<p class="muted small">${line}</p>`)}
							${result.dropped.length > 0 && html`<p class="field-error">${t.leftOut(result.dropped.length, result.dropped[0].reason)}</p>`}
						</div>`)
			}
		</div>
	</section>`
}
