// The LoRAs of the prompt as a stack of strengths, and the library as cards to add from.
import { address } from "../../lib/api.js";
import { cx, html, useState } from "../../lib/dom.js";
import {
	addTag,
	hasWord,
	moveTag,
	parseTags,
	removeTag,
	setTag,
	tagName,
	toggleWord,
	triggerWords,
} from "../../lib/prompt.js";
import { app } from "../../lib/state.js";
import { useStore } from "../../lib/store.js";
import { findLora, findModel } from "../../lib/worker.js";
import { t } from "../../strings.js";
import { Button } from "../../ui/button.js";
import { Icon } from "../../ui/icons.js";
import { Slider } from "../../ui/slider.js";
import { Swatch } from "../../ui/swatch.js";

/**
 * @typedef {{ prompt: string, onPrompt: (prompt: string) => void }} PromptProps
 */

/** The picture of a LoRA, or its cloth. @param {{ lora: Lora | undefined, name: string }} props */
export const LoraPicture = ({ lora, name }) =>
	lora?.preview
		? html`<img class="lora-picture" src=${address(`/v1/loras/${lora.id}/preview`)} alt="" loading="lazy" />`
		: html`<${Swatch} name=${lora?.hashes?.autov3 ?? name} />`;

/** @param {PromptProps} props */
export function Stack({ prompt, onPrompt }) {
	const loras = useStore(app, (state) => state.loras);
	const tags = parseTags(prompt);
	const [dragged, setDragged] = useState(/** @type {number | null} */ (null));
	const [open, setOpen] = useState(/** @type {number | null} */ (null));
	if (!tags.length) return null;
	const move = (/** @type {number} */ from, /** @type {number} */ to) => {
		if (to >= 0 && to < tags.length && from !== to) onPrompt(moveTag(prompt, from, to));
	};
	return html`<ol class="lora-stack" aria-label=${t.generate.stack}>
		${tags.map((tag, index) => {
			const lora = findLora(loras, tag.name);
			const name = lora?.name ?? tag.name;
			const apart = open === index || tag.te !== tag.unet;
			const set = (/** @type {Partial<{ te: number, unet: number }>} */ patch) =>
				onPrompt(setTag(prompt, index, { te: tag.te, unet: tag.unet, ...patch }));
			return html`<li
				key=${`${tag.name} ${tags.slice(0, index).filter((each) => each.name === tag.name).length}`}
				class=${cx("lora-item", dragged === index && "lora-item-dragged")}
				onDragOver=${(/** @type {DragEvent} */ event) => {
					if (dragged === null) return;
					event.preventDefault();
					if (dragged !== index) {
						move(dragged, index);
						setDragged(index);
					}
				}}
			>
				<button
					type="button"
					class="lora-grip"
					draggable="true"
					aria-label=${t.generate.reorder(name)}
					title=${t.generate.reorder(name)}
					onDragStart=${(/** @type {DragEvent} */ event) => {
						event.dataTransfer?.setData("text/plain", name);
						setDragged(index);
					}}
					onDragEnd=${() => setDragged(null)}
					onKeyDown=${(/** @type {KeyboardEvent} */ event) => {
						const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
						if (!step) return;
						event.preventDefault();
						move(index, index + step);
					}}
				>
					<${Icon} name="grip" />
				</button>
				<span class="lora-thumb"><${LoraPicture} lora=${lora} name=${name} /></span>
				<div class="grow">
					<div class="row">
						<span class="lora-name grow clip" title=${name}>${name}</span>
						${loras && !lora && html`<span class="badge badge-bad">${t.generate.missing}</span>`}
						<${Button} kind="quiet" size="small" icon="sliders" label=${t.generate.apart(name)} aria-expanded=${apart ? "true" : "false"} onClick=${() => setOpen(open === index ? null : index)} />
						<${Button} kind="quiet" size="small" icon="close" label=${t.generate.removeLora(name)} onClick=${() => onPrompt(removeTag(prompt, index))} />
					</div>
					${
						apart
							? html`<${Slider} label=${t.generate.textEncoder} min=${-1} max=${2} value=${tag.te} onChange=${(/** @type {number} */ te) => set({ te })} />
								<${Slider} label=${t.generate.denoiser} min=${-1} max=${2} value=${tag.unet} onChange=${(/** @type {number} */ unet) => set({ unet })} />`
							: html`<${Slider} label=${t.generate.strengthOf(name)} hideLabel min=${-1} max=${2} value=${tag.unet} onChange=${(/** @type {number} */ value) => set({ te: value, unet: value })} />`
					}
				</div>
			</li>`;
		})}
	</ol>`;
}

/** Words of the LoRAs in the prompt; a click puts one in or takes it out. @param {PromptProps} props */
export function Triggers({ prompt, onPrompt }) {
	const loras = useStore(app, (state) => state.loras);
	const [all, setAll] = useState(false);
	const words = [
		...new Set(
			parseTags(prompt).flatMap((tag) => {
				const lora = findLora(loras, tag.name);
				return lora ? triggerWords(lora) : [];
			}),
		),
	];
	if (!words.length) return null;
	const visible = all ? words : words.slice(0, 8);
	return html`<div class="row wrap triggers" role="group" aria-label=${t.generate.triggers}>
		${visible.map(
			(
				word,
			) => html`<button key=${word} type="button" class="chip" aria-pressed=${hasWord(prompt, word) ? "true" : "false"} onClick=${() => onPrompt(toggleWord(prompt, word))}>
			<span class="clip">${word}</span>
		</button>`,
		)}
		${words.length > 8 && html`<button type="button" class="chip" onClick=${() => setAll(!all)}>${all ? t.generate.fewer : t.generate.moreWords(words.length - 8)}</button>`}
	</div>`;
}

/**
 * Why a LoRA is not offered for a model; null where it is.
 * @param {Lora} lora
 * @param {string | null | undefined} base
 */
export function whyHidden(lora, base) {
	if (lora.error) return t.generate.unreadable;
	if (base && lora.base && lora.base !== base) return t.generate.madeFor(lora.base);
	return null;
}

/** @param {PromptProps & { model?: string }} props */
export function Picker({ prompt, onPrompt, model }) {
	const loras = useStore(app, (state) => state.loras);
	const capabilities = useStore(app, (state) => state.capabilities);
	const [query, setQuery] = useState("");
	const [everything, setEverything] = useState(false);
	const [limit, setLimit] = useState(24);
	const base = findModel(capabilities, model)?.base;
	const tags = parseTags(prompt);
	const text = query.trim().toLowerCase();
	const matches = (loras ?? []).filter(
		(lora) =>
			!text ||
			[lora.name, lora.alias, lora.title, lora.description, lora.path, ...triggerWords(lora)].some((field) =>
				field?.toLowerCase().includes(text),
			),
	);
	const hidden = matches.filter((lora) => whyHidden(lora, base));
	const shown = everything ? matches : matches.filter((lora) => !whyHidden(lora, base));
	const reasons = Object.entries(Object.groupBy(hidden, (lora) => /** @type {string} */ (whyHidden(lora, base)))).map(
		([reason, list]) => `${list?.length} ${reason}`,
	);
	return html`<div class="stack lora-picker">
		${
			(loras?.length ?? 0) > 4 &&
			html`<div class="search">
			<${Icon} name="search" />
			<input id="lora-search" class="input" type="search" placeholder=${t.generate.search} aria-label=${t.generate.search} value=${query} onInput=${(/** @type {any} */ e) => setQuery(e.currentTarget.value)} />
		</div>`
		}
		${loras?.length === 0 && html`<p class="muted small">${t.generate.noLoras} <a href="#/library">${t.nav.library}</a></p>`}
		<ul class="lora-cards">
			${shown.slice(0, limit).map((lora) => {
				const index = tags.findIndex((tag) => findLora(loras, tag.name)?.id === lora.id);
				const why = whyHidden(lora, base);
				return html`<li key=${lora.id}>
					<button
						type="button"
						class="lora-card"
						aria-pressed=${index >= 0 ? "true" : "false"}
						disabled=${Boolean(lora.error)}
						title=${[lora.description, why].filter(Boolean).join(" ") || lora.name}
						onClick=${() => onPrompt(index >= 0 ? removeTag(prompt, index) : addTag(prompt, tagName(lora, loras), lora.preferred_strength ?? 1))}
					>
						<span class="lora-card-picture"><${LoraPicture} lora=${lora} name=${lora.name} /></span>
						<span class="lora-card-name clip">${lora.name}</span>
						${why && html`<span class="lora-card-why clip">${why}</span>`}
						${index >= 0 && html`<span class="lora-card-check"><${Icon} name="check" /></span>`}
					</button>
				</li>`;
			})}
		</ul>
		${shown.length > limit && html`<${Button} size="small" onClick=${() => setLimit(limit + 48)}>${t.generate.moreLoras(shown.length - limit)}<//>`}
		${
			hidden.length > 0 &&
			html`<p class="small muted">
			${everything ? t.generate.allShown : t.generate.hidden(hidden.length, reasons.join(", "))}
			${" "}<button type="button" class="link" onClick=${() => setEverything(!everything)}>${everything ? t.generate.hideAgain : t.generate.showAll}</button>
		</p>`
		}
	</div>`;
}
