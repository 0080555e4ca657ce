// The form of a picture: prompt, LoRAs, settings, seed. Generate and Edit have one each.
import { html } from "../../lib/dom.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { findModel } from "../../lib/worker.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { Field, NumberField, Select } from "../../ui/field.js";
import { randomSeed } from "./draft.js";
import { Picker, Stack, Triggers } from "./loras.js";

/**
 * Prompt, what else decides most (`children`), LoRAs and settings.
 * @param {{ draft: DraftStore, size?: string, children?: any }} props size: what applies where width and height are left open
 */
export function Form({ draft, size, children }) {
	const state = useStore(draft, (all) => all);
	const capabilities = useStore(app, (all) => all.capabilities);
	const onPrompt = (/** @type {string} */ prompt) => draft.set({ prompt });
	return html`<div class="generate-fields">
		${
			(capabilities?.models.length ?? 0) > 1 &&
			html`<${Select}
			label=${t.generate.model}
			value=${state.model ?? findModel(capabilities, null)?.name ?? ""}
			options=${capabilities?.models.map((model) => model.name) ?? []}
			onChange=${(/** @type {string} */ model) => draft.set({ model })}
		/>`
		}
		<div class="field">
			<label for="prompt">${t.generate.prompt}</label>
			<textarea id="prompt" class="input prompt" rows="4" placeholder=${t.generate.promptPlaceholder} value=${state.prompt} onInput=${(/** @type {any} */ e) => onPrompt(e.currentTarget.value)}></textarea>
		</div>
		<${Triggers} prompt=${state.prompt} onPrompt=${onPrompt} />
		${children}
		<section class="stack" aria-labelledby="loras-title">
			<h2 id="loras-title" class="section-title">${t.generate.loras}</h2>
			<${Stack} prompt=${state.prompt} onPrompt=${onPrompt} />
			<${Picker} prompt=${state.prompt} onPrompt=${onPrompt} model=${state.model} />
		</section>
		<${Settings} draft=${draft} size=${size} />
	</div>`;
}

/** @param {{ draft: DraftStore, size?: string }} props */
function Settings({ draft, size }) {
	const state = useStore(draft, (all) => all);
	const capabilities = useStore(app, (all) => all.capabilities);
	const defaults = findModel(capabilities, state.model)?.defaults;
	const own = { value: "", label: t.generate.own };
	const set = (/** @type {string} */ name) => (/** @type {any} */ value) =>
		draft.set({ [name]: value === "" ? undefined : value });
	const changed = ["steps", "guidance", "width", "height", "sampler", "schedule", "clip_skip"].filter(
		(name) => /** @type {any} */ (state)[name] !== undefined,
	);
	return html`<details class="fold" open=${changed.length > 0 || state.negative_prompt !== ""}>
		<summary>${t.generate.settings}</summary>
		<div class="stack">
			<${Field} label=${t.generate.negative}>
				${(/** @type {string} */ id) => html`<textarea id=${id} class="input" rows="2" value=${state.negative_prompt} onInput=${(/** @type {any} */ e) => draft.set({ negative_prompt: e.currentTarget.value })}></textarea>`}
			<//>
			<div class="settings-grid">
				<${NumberField} label=${t.generate.steps} min=${1} max=${150} value=${state.steps} onChange=${set("steps")} placeholder=${String(defaults?.steps ?? "")} />
				<${NumberField} label=${t.generate.guidance} min=${0} step=${0.5} value=${state.guidance} onChange=${set("guidance")} placeholder=${String(defaults?.guidance ?? "")} />
				<${NumberField} label=${t.generate.width} min=${8} step=${8} value=${state.width} onChange=${set("width")} placeholder=${size ?? String(defaults?.size ?? "")} />
				<${NumberField} label=${t.generate.height} min=${8} step=${8} value=${state.height} onChange=${set("height")} placeholder=${size ?? String(defaults?.size ?? "")} />
				<${Select} label=${t.generate.sampler} value=${state.sampler ?? ""} options=${[own, ...(capabilities?.samplers ?? [])]} onChange=${set("sampler")} />
				<${Select} label=${t.generate.schedule} value=${state.schedule ?? ""} options=${[own, ...(capabilities?.schedules ?? [])]} onChange=${set("schedule")} />
				<${NumberField} label=${t.generate.clipSkip} min=${1} max=${12} value=${state.clip_skip} onChange=${set("clip_skip")} placeholder=${t.generate.own} />
			</div>
			${changed.length > 0 && html`<button type="button" class="link small" onClick=${() => draft.set(Object.fromEntries(changed.map((name) => [name, undefined])))}>${t.generate.reset}</button>`}
		</div>
	</details>`;
}

/** @param {{ draft: DraftStore }} props */
export function Seed({ draft }) {
	const seed = useStore(draft, (state) => state.seed);
	const locked = useStore(draft, (state) => state.locked);
	const count = useStore(draft, (state) => state.count);
	const most = useStore(app, (state) => state.capabilities?.limits.images_per_job);
	return html`<div class="seed">
		<${NumberField} label=${t.generate.seed} min=${0} value=${seed} placeholder=${t.generate.randomSeed} onChange=${(/** @type {number | undefined} */ value) => draft.set({ seed: value, locked: value !== undefined })} />
		<div class="row seed-buttons">
			<${Button} kind="quiet" icon=${locked ? "lock" : "unlock"} label=${locked ? t.generate.unlockSeed : t.generate.lockSeed} aria-pressed=${locked ? "true" : "false"} onClick=${() => draft.set({ locked: !locked, ...(seed === undefined ? { seed: randomSeed() } : {}) })} />
			<${Button} kind="quiet" icon="dice" label=${t.generate.roll} onClick=${() => draft.set({ seed: randomSeed() })} />
		</div>
		<${NumberField} label=${t.generate.count} min=${1} max=${most} value=${count} placeholder="1" onChange=${(/** @type {number | undefined} */ value) => draft.set({ count: value })} />
	</div>`;
}
