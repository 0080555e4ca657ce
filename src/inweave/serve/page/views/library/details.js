// Everything that is known of one LoRA, whether it fits, where its tensors go, and the file in other dialects.
import { address, api } from "../../lib/api.js";
import { html, useEffect, useState } from "../../lib/dom.js";
import { ago, bytes, decimal } from "../../lib/format.js";
import { href, navigate } from "../../lib/router.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { loadLoras } from "../../lib/worker.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { Confirm, Dialog } from "../../ui/dialog.js";
import { Check, Select } from "../../ui/field.js";
import { showError, toast } from "../../ui/toast.js";
import { algorithm, Picture, words } from "../library.js";
import { Fit } from "./fit.js";

/** @param {{ id: string, twins: Map<string, Lora[]>, onClose: () => void }} props */
export function Details({ id, twins, onClose }) {
	const [lora, setLora] = useState(/** @type {any} */ (null));
	const [asking, setAsking] = useState(false);
	useEffect(() => {
		api(`/v1/loras/${encodeURIComponent(id)}`).then(setLora, (error) => {
			showError(error);
			onClose();
		});
	}, [id]);
	if (!lora) return null;
	const same = (twins.get(lora.id) ?? []).filter((each) => each.id !== lora.id);
	const remove = () =>
		api(`/v1/loras/${lora.id}`, { method: "DELETE" })
			.then(() => {
				toast(t.library.deleted(lora.name));
				onClose();
				return loadLoras();
			})
			.catch(showError);
	return html`<${Dialog} title=${lora.name} onClose=${onClose} wide>
		<div class="library-details">
			<div class="library-detail-picture"><${Picture} lora=${lora} /></div>
			<div class="stack grow">
				${lora.description && html`<p>${lora.description}</p>`}
				<${Facts} lora=${lora} />
				<div class="row wrap">
					<${Button} kind="primary" onClick=${() => navigate("generate", { prompt: `<lora:${lora.name}:${lora.preferred_strength ?? 1}>` })}>${t.library.use}<//>
					<${Button} icon="download" href=${address(`/v1/loras/${lora.id}/file`)} download>${t.actions.download}<//>
					${lora.removable && html`<${Button} kind="danger" icon="trash" onClick=${() => setAsking(true)}>${t.actions.delete}<//>`}
				</div>
			</div>
		</div>
		${
			lora.health.length > 0 &&
			html`<section>
				<h3>${t.library.health}</h3>
				<ul class="library-problems">${lora.health.map((/** @type {string} */ line) => html`<li>${line}</li>`)}</ul>
			</section>`
		}
		${
			same.length > 0 &&
			html`<section>
				<h3>${t.library.sameContents}</h3>
				<p class="row wrap">${same.map((each) => html`<a href=${href("library", { lora: each.id })}>${each.path}</a>`)}</p>
			</section>`
		}
		<${Words} lora=${lora} />
		<${Fit} lora=${lora} />
		<${Convert} lora=${lora} />
		<${Hashes} lora=${lora} />
		${
			Object.keys(lora.metadata).length > 0 &&
			html`<details class="fold">
				<summary>${t.library.metadata(Object.keys(lora.metadata).length)}</summary>
				<dl class="library-metadata">
					${Object.entries(lora.metadata).map(([name, value]) => html`<div><dt>${name}</dt><dd class="mono">${String(value).slice(0, 2000)}</dd></div>`)}
				</dl>
			</details>`
		}
		${asking && html`<${Confirm} title=${t.library.deleteTitle(lora.name)} text=${t.library.deleteText} confirm=${t.actions.delete} onConfirm=${remove} onClose=${() => setAsking(false)} />`}
	<//>`;
}

/** @param {{ lora: any }} props */
function Facts({ lora }) {
	const rows = [
		[
			t.library.base,
			lora.base ? `${lora.base} (${t.library.sure(Math.round(lora.confidence * 100))})` : t.library.unknownBase,
		],
		[t.library.algorithm, algorithm(lora)],
		[t.library.inside, t.library.modules(lora.modules, decimal(lora.tensors), lora.dtypes.join(", "))],
		[t.library.written, lora.dialects.join(", ")],
		[t.library.file, `${lora.path}, ${bytes(lora.size)}, ${ago(lora.modified)}`],
		[t.library.preferred, lora.preferred_strength ?? ""],
		[t.library.notes, lora.notes ?? ""],
	];
	return html`<dl class="library-facts">
		${rows.filter(([, value]) => value !== "").map(([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`)}
	</dl>`;
}

/** @param {string} text */
const copy = (text) =>
	navigator.clipboard?.writeText(text).then(
		() => toast(t.library.copied(text)),
		() => toast(t.library.notCopied, { kind: "warning" }),
	) ?? toast(t.library.notCopied, { kind: "warning" });

/** @param {{ lora: any }} props */
function Words({ lora }) {
	const list = words(lora);
	return (
		list.length > 0 &&
		html`<section>
			<h3>${t.library.triggers}</h3>
			<p class="row wrap">
				${list.slice(0, 40).map((word) => html`<button type="button" class="chip" title=${t.library.copy} onClick=${() => copy(word)}>${word}</button>`)}
				${list.length > 40 && html`<span class="muted small">${t.library.moreWords(list.length - 40)}</span>`}
			</p>
		</section>`
	);
}

/** @param {{ lora: any }} props */
const Hashes = ({ lora }) => html`<section>
	<h3>${t.library.hashes}</h3>
	${
		lora.hashes
			? html`<dl class="library-facts">
					${Object.entries(lora.hashes)
						.filter(([, hash]) => hash)
						.map(
							([name, hash]) => html`<div>
								<dt>${/** @type {Record<string, string>} */ (t.library.hashNames)[name] ?? name}</dt>
								<dd><button type="button" class="library-hash mono" title=${t.library.copy} onClick=${() => copy(String(hash))}>${hash}</button></dd>
							</div>`,
						)}
				</dl>`
			: html`<p class="muted">${t.library.notHashed}</p>`
	}
</section>`;

/** @param {{ lora: any }} props */
function Convert({ lora }) {
	const dialects = useStore(app, (state) => state.capabilities)?.dialects ?? [];
	const [to, setTo] = useState("kohya");
	const [drop, setDrop] = useState(false);
	const [busy, setBusy] = useState(false);
	const [result, setResult] = useState(/** @type {any} */ (null));
	/** @param {Event} event */
	const convert = async (event) => {
		event.preventDefault();
		setBusy(true);
		setResult(null);
		try {
			setResult(await api("/v1/loras/convert", { json: { lora: lora.id, to, drop } }));
		} catch (/** @type {any} */ error) {
			setResult({ error: error.message });
		}
		setBusy(false);
	};
	return html`<section>
		<h3>${t.library.convert}</h3>
		<form class="library-form" onSubmit=${convert}>
			<${Select}
				label=${t.library.dialect}
				value=${to}
				options=${dialects.map((/** @type {string} */ value) => ({ value, label: /** @type {Record<string, string>} */ (t.library.dialects)[value] ?? value }))}
				onChange=${setTo}
			/>
			<${Check} label=${t.library.leaveOut} checked=${drop} onChange=${setDrop} />
			<${Button} type="submit" busy=${busy}>${t.library.convertAction}<//>
		</form>
		<div role="status">
			${
				result &&
				(result.error
					? html`<p class="field-error library-lines">${result.error}</p>`
					: html`<div class="library-answer">
							<${Button} kind="primary" icon="download" href=${result.url} download=${result.file}>${t.library.downloadAs(result.file, bytes(result.bytes))}<//>
							${[...result.notes, ...result.warnings].map((/** @type {string} */ line) => html`<p class="muted small">${line}</p>`)}
							${result.dropped.length > 0 && html`<p class="field-error">${t.library.leftOut(result.dropped.length, result.dropped[0].reason)}</p>`}
						</div>`)
			}
		</div>
	</section>`;
}
