// "Does it fit?": a LoRA against a model of this worker or any known base, and where every tensor goes.
import { api } from "../../lib/api.js";
import { html, useState } from "../../lib/dom.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { findModel } from "../../lib/worker.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { Field } from "../../ui/field.js";
import { Icon } from "../../ui/icons.js";

const ROWS = 200;
const FAULTS = ["unplaced", "mismatched", "orphans", "duplicates", "unsupported"];

/** @param {{ lora: any }} props */
export function Fit({ lora }) {
	const capabilities = useStore(app, (state) => state.capabilities);
	const [target, setTarget] = useState(`model:${findModel(capabilities, null)?.name ?? ""}`);
	const [busy, setBusy] = useState(false);
	const [answer, setAnswer] = useState(/** @type {any} */ (null));
	/** @param {Event} event */
	const check = async (event) => {
		event.preventDefault();
		setBusy(true);
		setAnswer(null);
		const [kind, name] = target.split(/:(.*)/s);
		try {
			setAnswer(await api("/v1/loras/check", { json: { lora: lora.id, [kind]: name, placements: true } }));
		} catch (/** @type {any} */ error) {
			setAnswer({ error: error.message });
		}
		setBusy(false);
	};
	return html`<section>
		<h3>${t.library.fit}</h3>
		<form class="library-form" onSubmit=${check}>
			<${Field} label=${t.library.target}>
				${(
					/** @type {string} */ id,
				) => html`<select id=${id} class="input" value=${target} onChange=${(/** @type {any} */ e) => setTarget(e.currentTarget.value)}>
					<optgroup label=${t.library.models}>
						${capabilities?.models.map(({ name }) => html`<option value=${`model:${name}`} selected=${target === `model:${name}`}>${name}</option>`)}
					</optgroup>
					<optgroup label=${t.library.bases}>
						${capabilities?.bases?.map((name) => html`<option value=${`base:${name}`} selected=${target === `base:${name}`}>${name}</option>`)}
					</optgroup>
				</select>`}
			<//>
			<${Button} type="submit" busy=${busy}>${t.library.check}<//>
		</form>
		<div role="status">${answer && (answer.error ? html`<p class="field-error">${answer.error}</p>` : html`<${Verdict} verdict=${answer.verdict} name=${answer.model ?? answer.base} />`)}</div>
	</section>`;
}

/** @param {{ verdict: any, name: string }} props */
function Verdict({ verdict, name }) {
	const findings = FAULTS.flatMap((kind) =>
		(verdict[kind] ?? []).map((/** @type {any} */ each) => ({ ...each, kind: t.library.faults[kind] })),
	);
	return html`<div class="library-answer">
		<p class=${verdict.ok ? "library-verdict library-fits" : "library-verdict"}>
			<${Icon} name=${verdict.ok ? "check" : "warning"} />
			<span>${verdict.ok ? t.library.fits(name, verdict.tensors) : (verdict.error ?? t.library.fitsNot(name, verdict.placed, verdict.tensors))}</span>
		</p>
		${verdict.nonfinite.length > 0 && html`<p class="field-error">${t.library.nonfinite(verdict.nonfinite.length)}</p>`}
		${verdict.warnings.map((/** @type {string} */ line) => html`<p class="muted small">${line}</p>`)}
		${
			findings.length > 0 &&
			html`<details class="fold" open=${findings.length < 10}>
				<summary>${t.library.unused(findings.length)}</summary>
				<${Rows} columns=${t.library.findingColumns} rows=${findings.map((each) => [each.module || each.keys[0], each.kind, each.reason, each.nearest ?? (each.expected ? each.expected.join(" × ") : "")])} />
			</details>`
		}
		${
			verdict.placements.length > 0 &&
			html`<details class="fold">
				<summary>${t.library.placements(verdict.placed)}</summary>
				<${Rows} columns=${t.library.placementColumns} rows=${verdict.placements.map((/** @type {any} */ each) => [each.keys.join("\n"), each.component, each.tensor + (each.rows ? ` ${t.library.rows(each.rows[0], each.rows[0] + each.rows[1] - 1)}` : ""), each.shape.join(" × "), each.algorithm])} />
			</details>`
		}
	</div>`;
}

/**
 * A long table that can be searched.
 * @param {{ columns: string[], rows: string[][] }} props
 */
function Rows({ columns, rows }) {
	const [query, setQuery] = useState("");
	const [limit, setLimit] = useState(ROWS);
	const matching = query ? rows.filter((row) => row.join("\n").toLowerCase().includes(query.toLowerCase())) : rows;
	return html`<div class="stack">
		${rows.length > 10 && html`<input class="input" type="search" aria-label=${t.library.filterRows} placeholder=${t.library.filterRows} value=${query} onInput=${(/** @type {any} */ e) => setQuery(e.currentTarget.value)} />`}
		<div class="library-scroll library-rows" tabindex="0" role="region" aria-label=${columns[0]}>
			<table class="library-table">
				<thead><tr>${columns.map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
				<tbody>${matching.slice(0, limit).map((row) => html`<tr>${row.map((cell, index) => html`<td class=${index === 0 ? "mono library-lines" : "mono"}>${cell}</td>`)}</tr>`)}</tbody>
			</table>
		</div>
		${matching.length > limit && html`<${Button} size="small" onClick=${() => setLimit(limit + ROWS)}>${t.library.more(matching.length - limit)}<//>`}
	</div>`;
}
