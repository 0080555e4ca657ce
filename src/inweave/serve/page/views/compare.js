// Compare: the same seed with and without LoRAs, over strengths, over pairs of LoRAs, over seeds.
import { api } from "../lib/api.js";
import { html, useEffect, useState } from "../lib/dom.js";
import { useShortcuts } from "../lib/keys.js";
import { currentParams, remember, useRoute } from "../lib/router.js";
import { app } from "../lib/state.js";
import { useStore } from "../lib/store.js";
import { t } from "../strings.js";
import { BeforeAfter } from "../ui/beforeafter.js";
import { Button } from "../ui/button.js";
import { Empty } from "../ui/empty.js";
import { Field, NumberField, Segmented, Select } from "../ui/field.js";
import { Slider } from "../ui/slider.js";
import { Thread } from "../ui/swatch.js";
import { showError } from "../ui/toast.js";
import { cellKey, cells, run, stop } from "./compare/run.js";
import { extractTags, formAddress, formOf, formOfJob, MODES, sheetOf } from "./compare/sheet.js";

export function View() {
	const loras = useStore(app, (state) => state.loras);
	const made = useStore(cells, (state) => state.made);
	const left = useStore(cells, (state) => state.left);
	const { params } = useRoute();
	const [form, setForm] = useState(() => formOf(currentParams()));
	const [started, setStarted] = useState(false);
	const change = (/** @type {Partial<typeof form>} */ patch) => setForm((before) => ({ ...before, ...patch }));
	useEffect(() => {
		if (params.job) {
			api(`/v1/jobs/${encodeURIComponent(params.job)}`)
				.then((job) => setForm(formOfJob(job, Number(params.image ?? 0))))
				.catch(showError);
		}
	}, [params.job, params.image]);
	useEffect(() => remember("compare", formAddress(form)), [form]);
	useEffect(() => {
		if (loras?.length && !form.loras.length) {
			const usable = loras.filter((lora) => !lora.error);
			change({
				loras: usable.slice(0, 1).map((lora) => ({ name: lora.name, strength: lora.preferred_strength ?? 1 })),
			});
		}
	}, [loras, form.loras.length]);
	const sheet = sheetOf(form);
	const compare = (/** @type {typeof form} */ which = form) => {
		const next = extractTags(which);
		setForm(next);
		setStarted(true);
		run(sheetOf(next), next.mode === "without").catch(showError);
	};
	const redraw = (/** @type {typeof form} */ next) => started && form.mode === "without" && compare(next);
	useShortcuts([
		{ keys: "mod+Enter", label: t.compare.run, group: t.compare.title, run: () => compare() },
		{ keys: "Escape", label: t.compare.cancel, group: t.compare.title, run: () => stop().catch(showError) },
	]);
	const setLora = (/** @type {number} */ index, /** @type {any} */ patch) => ({
		...form,
		loras: form.loras.map((each, place) => (place === index ? { ...each, ...patch } : each)),
	});
	return html`<header class="view-head">
			<div>
				<h1>${t.compare.title}</h1>
				<p>${t.compare.text}</p>
			</div>
			<${Segmented}
				label=${t.compare.mode}
				value=${form.mode}
				options=${MODES.map((value) => ({ value, label: t.compare.modes[value] }))}
				onChange=${(/** @type {string} */ mode) => change({ mode })}
			/>
		</header>
		<div class="compare">
			<form
				class="card panel stack"
				onSubmit=${(/** @type {Event} */ event) => {
					event.preventDefault();
					compare();
				}}
			>
				<${Field} label=${t.compare.prompt}>
					${(/** @type {string} */ id) => html`<textarea id=${id} class="input" rows="3" value=${form.prompt} onInput=${(/** @type {any} */ e) => change({ prompt: e.currentTarget.value })}></textarea>`}
				<//>
				${form.loras.map(
					(lora, index) => html`<fieldset class="compare-lora" key=${index}>
						<legend class="visually-hidden">${t.compare.lora(index + 1)}</legend>
						<div class="compare-lora-name">
							<${Select}
								label=${t.compare.lora(index + 1)}
								value=${lora.name}
								options=${[...new Set([lora.name, ...(loras ?? []).filter((each) => !each.error).map((each) => each.name)])]}
								onChange=${(/** @type {string} */ name) => change(setLora(index, { name, te: undefined, unet: undefined }))}
							/>
							<${Button} kind="quiet" icon="close" label=${t.compare.remove(lora.name)} onClick=${() => change({ loras: form.loras.filter((_, place) => place !== index) })} />
						</div>
						<${Slider}
							label=${t.compare.strength(lora.name)}
							value=${lora.strength}
							min=${-1}
							max=${2}
							onChange=${(/** @type {number} */ strength) => change(setLora(index, { strength, te: undefined, unet: undefined }))}
							onCommit=${(/** @type {number} */ strength) => redraw(setLora(index, { strength, te: undefined, unet: undefined }))}
						/>
					</fieldset>`,
				)}
				${
					loras &&
					loras.length > 0 &&
					html`<${Button} icon="plus" onClick=${() => change({ loras: [...form.loras, { name: another(loras, form.loras), strength: 1 }] })}>${t.compare.add}<//>`
				}
				<div class="compare-numbers">
					<${NumberField} label=${t.compare.seed} value=${form.seed} min=${0} onChange=${(/** @type {number | undefined} */ seed) => change({ seed: seed ?? 0 })} />
					<${NumberField} label=${t.compare.steps} value=${form.steps} min=${1} max=${150} placeholder=${t.compare.own} onChange=${(/** @type {number | undefined} */ steps) => change({ steps })} />
					${form.mode !== "without" && html`<${NumberField} label=${t.compare.count} value=${form.count} min=${2} max=${8} onChange=${(/** @type {number | undefined} */ count) => change({ count: Math.max(2, Math.min(8, count ?? 4)) })} />`}
				</div>
				${form.mode === "pairs" && form.loras.length < 2 && html`<p class="field-hint">${t.compare.two}</p>`}
				<div class="row wrap">
					<${Button} kind="primary" type="submit" disabled=${!sheet}>${t.compare.run}<//>
					${left > 0 && html`<${Button} onClick=${() => stop().catch(showError)}>${t.compare.cancel}<//>`}
				</div>
				${left > 0 && html`<div role="status"><p class="muted small">${t.compare.left(left)}</p><${Thread} percent=${null} label=${t.compare.left(left)} /></div>`}
			</form>
			<div class="compare-result">
				${
					sheet && started
						? html`<${Sheet} sheet=${sheet} made=${made} slider=${form.mode === "without"} prompt=${form.prompt} />`
						: html`<${Empty} name="compare" title=${t.compare.emptyTitle} text=${t.compare.emptyText} />`
				}
			</div>
		</div>`;
}

/**
 * @param {Lora[]} loras
 * @param {{ name: string }[]} chosen
 */
const another = (loras, chosen) =>
	(loras.find((lora) => !lora.error && !chosen.some((each) => each.name === lora.name)) ?? loras[0]).name;

/** @param {{ sheet: import("./compare/sheet.js").Sheet, made: Record<string, any>, slider: boolean, prompt: string }} props */
function Sheet({ sheet, made, slider, prompt }) {
	const [kept, setKept] = useState(/** @type {any[]} */ ([]));
	const images = sheet.rows[0].map((request) => made[cellKey(request)]);
	const urls = images.map((each) => each?.image?.url ?? each?.preview);
	const ready = slider && urls.every(Boolean);
	const size = images.find((each) => each?.image)?.image ?? { width: 1, height: 1 };
	useEffect(() => {
		if (ready) setKept(urls);
	}, [ready, ...urls]);
	if (slider) {
		const failed = images.find((each) => each?.error);
		if (failed) return html`<p class="field-error" role="alert">${failed.error}</p>`;
		const [before, after] = ready ? urls : kept; // the last pair stays while the next one is made
		if (!before || !after) return html`<div class="compare-waiting"></div>`;
		return html`<${BeforeAfter}
			before=${before}
			after=${after}
			beforeLabel=${sheet.columns[0]}
			afterLabel=${sheet.columns[1]}
			width=${size.width}
			height=${size.height}
			alt=${prompt || t.compare.noPrompt}
		/>`;
	}
	return html`<div class="compare-scroll" tabindex="0" role="region" aria-label=${t.compare.sheet}>
		<table class="compare-sheet">
			<thead>
				<tr>
					<td></td>
					${sheet.columns.map((name) => html`<th scope="col">${name}</th>`)}
				</tr>
			</thead>
			<tbody>
				${sheet.rows.map(
					(requests, row) => html`<tr>
						<th scope="row">${sheet.labels[row]}</th>
						${requests.map((request, column) => {
							const cell = made[cellKey(request)];
							return html`<td>
								${
									cell?.image
										? html`<a href=${cell.image.url} target="_blank" rel="noopener"><img src=${cell.image.url} width=${cell.image.width} height=${cell.image.height} alt=${`${sheet.labels[row]}, ${sheet.columns[column]}`} /></a>`
										: html`<div class="compare-waiting">${cell?.error && html`<span class="field-error">${cell.error}</span>`}</div>`
								}
							</td>`;
						})}
					</tr>`,
				)}
			</tbody>
		</table>
	</div>`;
}
