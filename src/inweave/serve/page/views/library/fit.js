// The compatibility of a LoRA with a model or a known base, and where every tensor goes.
import {
	api,
	app,
	Button,
	Field,
	findModel,
	html,
	Icon,
	Search,
	submits,
	useBusy,
	useState,
	useStore
} from "../../kit.js"
import {t} from "./strings.js"

const ROWS = 200
const FAULTS = /** @type {const} */ (["unplaced", "mismatched", "orphans", "duplicates", "unsupported"])

/** @param {{ lora: Lora }} props */
export function Fit({lora}) {
	const {capabilities} = useStore(app)
	const [target, setTarget] = useState(`model:${findModel(capabilities, null)?.name ?? ""}`)
	const [busy, during] = useBusy()
	const [answer, setAnswer] = useState(/** @type {any} */ (null))
	const check = () => {
		setAnswer(null)
		const [kind, name] = target.split(/:(.*)/s)
		const verdict = api("/v1/loras/check", {json: {lora: lora.id, [kind]: name, placements: true}})
		during(verdict.catch(error => ({error: error.message})).then(setAnswer))
	}
	return html`<section>
		<h3>${t.fit}</h3>
		<form class="library-form" onSubmit=${submits(check)}>
			<${Field} label=${t.target}>
				${id => html`<select id=${id} class="input" value=${target} onChange=${e => setTarget(e.currentTarget.value)}>
					<optgroup label=${t.models}>
						${capabilities?.models.map(({name}) => html`<option value=${`model:${name}`} selected=${target === `model:${name}`}>${name}</option>`)}
					</optgroup>
					<optgroup label=${t.bases}>
						${capabilities?.bases?.map(name => html`<option value=${`base:${name}`} selected=${target === `base:${name}`}>${name}</option>`)}
					</optgroup>
				</select>`}
			<//>
			<${Button} type="submit" busy=${busy}>${t.check}<//>
		</form>
		<div role="status">${answer && (answer.error ? html`<p class="field-error">${answer.error}</p>` : html`<${Verdict} verdict=${answer.verdict} name=${answer.model ?? answer.base} />`)}</div>
	</section>`
}

/** @param {{ verdict: Verdict, name: string }} props */
function Verdict({verdict, name}) {
	const findings = FAULTS.flatMap(kind => (verdict[kind] ?? []).map(each => ({...each, kind: t.faults[kind]})))
	return html`<div class="library-answer">
		<p class=${verdict.ok ? "library-verdict library-fits" : "library-verdict"}>
			<${Icon} name=${verdict.ok ? "check" : "warning"} />
			<span>${verdict.ok ? t.fits(name, verdict.tensors) : (verdict.error ?? t.fitsNot(name, verdict.placed, verdict.tensors))}</span>
		</p>
		${verdict.nonfinite.length > 0 && html`<p class="field-error">${t.nonfinite(verdict.nonfinite.length)}</p>`}
		${verdict.warnings.map(line => html`<p class="muted small">${line}</p>`)}
		${
			findings.length > 0 &&
			html`<details class="fold" open=${findings.length < 10}>
				<summary>${t.unused(findings.length)}</summary>
				<${Rows} columns=${t.findingColumns} rows=${findings.map(each => [each.module || each.keys[0], each.kind, each.reason, each.nearest ?? (each.expected ? each.expected.join(" × ") : "")])} />
			</details>`
		}
		${
			verdict.placements.length > 0 &&
			html`<details class="fold">
				<summary>${t.placements(verdict.placed)}</summary>
				<${Rows} columns=${t.placementColumns} rows=${verdict.placements.map(each => [each.keys.join("\n"), each.component, each.tensor + (each.rows ? ` ${t.rows(each.rows[0], each.rows[0] + each.rows[1] - 1)}` : ""), each.shape.join(" × "), each.algorithm])} />
			</details>`
		}
	</div>`
}

/** A long table that can be searched. @param {{ columns: string[], rows: string[][] }} props */
function Rows({columns, rows}) {
	const [query, setQuery] = useState("")
	const [limit, setLimit] = useState(ROWS)
	const matching = query ? rows.filter(row => row.join("\n").toLowerCase().includes(query.toLowerCase())) : rows
	return html`<div class="stack">
		${rows.length > 10 && html`<${Search} aria-label=${t.filterRows} placeholder=${t.filterRows} value=${query} onChange=${setQuery} />`}
		<div class="library-scroll library-rows" tabindex="0" role="region" aria-label=${columns[0]}>
			<table class="library-table">
				<thead><tr>${columns.map(name => html`<th scope="col">${name}</th>`)}</tr></thead>
				<tbody>${matching.slice(0, limit).map(row => html`<tr>${row.map((cell, index) => html`<td class=${index === 0 ? "mono library-lines" : "mono"}>${cell}</td>`)}</tr>`)}</tbody>
			</table>
		</div>
		${matching.length > limit && html`<${Button} size="small" onClick=${() => setLimit(limit + ROWS)}>${t.more(matching.length - limit)}<//>`}
	</div>`
}
