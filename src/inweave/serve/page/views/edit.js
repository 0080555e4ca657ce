// Edit: image to image, and inpainting where a mask is painted.
import { html, useEffect, useState } from "../lib/dom.js";
import { useShortcuts } from "../lib/keys.js";
import { navigate, useRoute } from "../lib/router.js";
import { app } from "../lib/state.js";
import { useStore } from "../lib/store.js";
import { t } from "../strings.js";
import { Button } from "../ui/button.js";
import { DropZone, usePageDrop } from "../ui/dropzone.js";
import { Segmented } from "../ui/field.js";
import { Slider } from "../ui/slider.js";
import { showError } from "../ui/toast.js";
import { Canvas } from "./edit/canvas.js";
import { Result, useAsSource, useResults } from "./edit/result.js";
import { cancel, draft, edit, openAddress, openFile, submit, zoomBy } from "./edit/state.js";
import { fit, setFeather, setSize, Tools, takeAlpha, toggleMask } from "./edit/tools.js";
import { Form, Seed } from "./generate/form.js";
import { Gallery, picturesOf } from "./generate/gallery.js";

const PICTURES = "image/*";

/** @param {File[]} files */
const open = ([file]) => openFile(file).catch(showError);

export function View() {
	const { params } = useRoute();
	const source = useStore(edit, (state) => state.source);
	const shown = useStore(edit, (state) => state.shown);
	const painted = useStore(edit, (state) => (state.mask?.painted ?? 0) > 0);
	const [busy, setBusy] = useState(false);
	const { pictures, current } = useResults();
	const over = usePageDrop(open);
	useEffect(() => {
		openAddress(params).catch(showError);
	}, [params]);
	const run = () => {
		setBusy(true);
		submit()
			.then(() => {
				const work = document.querySelector(".edit-work");
				if (work && work.getBoundingClientRect().top < 0) work.scrollIntoView(); // the form is below it on a phone
			}, showError)
			.finally(() => setBusy(false));
	};
	useEditKeys(run, () => pictures[0] && useAsSource(pictures[0]));
	return html`<h1 class="visually-hidden">${t.edit.title}</h1>
		<div class="generate edit">
			<div class="edit-work" data-shown=${shown}>
				${source ? html`<${Work} pictures=${pictures} current=${current} shown=${shown} />` : html`<${Start} />`}
			</div>
			<form
				class="generate-form card"
				onSubmit=${(/** @type {Event} */ event) => {
					event.preventDefault();
					run();
				}}
			>
				<${Form} draft=${draft} size=${t.edit.ownSize}><${Strength} /><//>
				<div class="generate-submit">
					<${Seed} draft=${draft} />
					<${Button} kind="primary" size="large" type="submit" busy=${busy} disabled=${!source}>
						${!source ? t.edit.choose : painted ? t.edit.inpaint : t.edit.transform}
					<//>
				</div>
			</form>
		</div>
		${over && html`<div class="drop-veil">${t.edit.dropHint}</div>`}`;
}

/** Nothing to edit yet: a file, or one of the pictures that were made here. */
function Start() {
	const ended = useStore(app, (state) => state.ended);
	const pictures = picturesOf(ended);
	return html`<${DropZone} onFiles=${open} accept=${PICTURES} label=${t.edit.drop} hint=${t.edit.dropText} icon="picture" />
		${
			pictures.length > 0 &&
			html`<${Gallery} pictures=${pictures} selected=${null} onSelect=${(/** @type {any} */ each) => navigate("edit", { job: each.job.id, image: each.image.index })} />`
		}`;
}

/** @param {{ pictures: any[], current: any, shown: string }} props */
const Work = ({ pictures, current, shown }) => html`<div class="row wrap spread edit-head">
		<div class="edit-switch">
			<${Segmented}
				label=${t.edit.show}
				value=${shown}
				options=${["picture", "result"].map((value) => ({ value, label: t.edit.parts[value] }))}
				onChange=${(/** @type {any} */ value) => edit.set({ shown: value })}
			/>
		</div>
		<${DropZone} onFiles=${open} accept=${PICTURES} label=${t.edit.another} icon="picture" compact />
	</div>
	<section class="card edit-picture" aria-label=${t.edit.parts.picture}>
		<${Canvas} />
		<${Tools} />
		<p class="small muted edit-hint" id="edit-hint">${t.edit.hint}</p>
	</section>
	<section class="card edit-result" aria-label=${t.edit.parts.result}>
		<${Result} pictures=${pictures} current=${current} />
	</section>`;

function Strength() {
	const strength = useStore(draft, (state) => state.strength) ?? 0.75;
	const set = (/** @type {number} */ value) => draft.set({ strength: Math.min(1, Math.max(0, value)) });
	return html`<div>
		<${Slider} label=${t.edit.strength} value=${strength} onChange=${set} />
		<p class="field-hint">${t.edit.strengthHint}</p>
	</div>`;
}

/** @param {() => void} run @param {() => void} proceed */
function useEditKeys(run, proceed) {
	const group = t.edit.title;
	const mask = () => edit.get().mask;
	const keys = t.edit.keys;
	useShortcuts([
		{ keys: "mod+Enter", label: keys.run, group, run },
		{ keys: "Escape", label: t.generate.keys.cancel, group, run: () => cancel().catch(showError) },
		{ keys: "p", label: t.generate.keys.prompt, group, run: () => document.getElementById("prompt")?.focus() },
		{ keys: "b", label: t.edit.names.brush, group, run: () => edit.set({ tool: "brush" }) },
		{ keys: "e", label: t.edit.names.eraser, group, run: () => edit.set({ tool: "eraser" }) },
		{ keys: "h", label: t.edit.names.hand, group, run: () => edit.set({ tool: "hand" }) },
		{ keys: "[", label: keys.smaller, group, run: () => setSize(edit.get().size / 1.2) },
		{ keys: "]", label: keys.larger, group, run: () => setSize(Math.max(edit.get().size * 1.2, edit.get().size + 1)) },
		{ keys: "{", label: keys.harder, group, run: () => setFeather((draft.get().feather ?? 0) - 2) },
		{ keys: "}", label: keys.softer, group, run: () => setFeather((draft.get().feather ?? 0) + 2) },
		{
			keys: "mod+z",
			label: t.edit.undo,
			group,
			textOwn: true,
			run: (event) => (event.shiftKey ? mask()?.redo() : mask()?.undo()),
		},
		{ keys: "mod+y", label: t.edit.redo, group, textOwn: true, run: () => mask()?.redo() },
		{ keys: "Delete", label: t.edit.clear, group, run: () => mask()?.clear() },
		{ keys: "i", label: t.edit.invert, group, run: () => mask()?.invert() },
		{ keys: "a", label: t.edit.alpha, group, run: takeAlpha },
		{ keys: "m", label: t.edit.hide, group, run: toggleMask },
		{ keys: "+", label: t.edit.zoomIn, group, run: () => zoomBy(1.25) },
		{ keys: "-", label: t.edit.zoomOut, group, run: () => zoomBy(0.8) },
		{ keys: "0", label: t.edit.fit, group, run: fit },
		{
			keys: "x",
			label: keys.other,
			group,
			run: () => edit.set(({ shown }) => ({ shown: shown === "result" ? "picture" : "result" })),
		},
		{ keys: "s", label: t.edit.useResult, group, run: proceed },
	]);
}
