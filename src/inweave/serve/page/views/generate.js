// Generate: the form, the picture, the gallery.
import { api } from "../lib/api.js";
import { html, useState } from "../lib/dom.js";
import { cancelJob } from "../lib/jobs.js";
import { useShortcuts } from "../lib/keys.js";
import { formatTag, parseTags, tagName } from "../lib/prompt.js";
import { app } from "../lib/state.js";
import { useStore } from "../lib/store.js";
import { t } from "../strings.js";
import { Button } from "../ui/button.js";
import { usePageDrop } from "../ui/dropzone.js";
import { showError, toast } from "../ui/toast.js";
import { draft, randomSeed, submitDraft } from "./generate/draft.js";
import { Form, Seed } from "./generate/form.js";
import { Gallery, keyOf, picturesOf } from "./generate/gallery.js";
import { Finished, Nothing, Running, removePicture, usePicture } from "./generate/stage.js";

export function View() {
	const ended = useStore(app, (state) => state.ended);
	const active = useStore(app, (state) => state.active);
	const [selected, setSelected] = useState(/** @type {string | null} */ (null));
	const [busy, setBusy] = useState(false);
	const pictures = picturesOf(ended);
	const current = active?.find((job) => job.operation !== "train");
	const chosen = pictures.find((picture) => keyOf(picture) === selected);
	const shown = chosen ?? (current ? undefined : pictures[0]);
	const over = usePageDrop((files) => restore(files[0]).catch(showError));
	const submit = () => {
		setBusy(true);
		submitDraft(draft, { operation: "image_generation" })
			.then(() => setSelected(null), showError)
			.finally(() => setBusy(false));
	};
	const step = (/** @type {number} */ by) => {
		const index = shown ? pictures.indexOf(shown) : -1;
		const next = pictures[Math.max(0, Math.min(pictures.length - 1, index + by))];
		if (next) setSelected(keyOf(next));
	};
	const group = t.generate.title;
	useShortcuts([
		{ keys: "mod+Enter", label: t.generate.keys.generate, group, run: submit },
		{
			keys: "Escape",
			label: t.generate.keys.cancel,
			group,
			run: () => current && cancelJob(current.id).catch(showError),
		},
		{ keys: "p", label: t.generate.keys.prompt, group, run: () => document.getElementById("prompt")?.focus() },
		{ keys: "/", label: t.generate.keys.search, group, run: () => document.getElementById("lora-search")?.focus() },
		{ keys: "r", label: t.generate.keys.seed, group, run: () => draft.set({ seed: randomSeed() }) },
		{ keys: "l", label: t.generate.keys.lock, group, run: () => draft.set((state) => ({ locked: !state.locked })) },
		{ keys: "k", label: t.generate.keys.previous, group, run: () => step(-1) },
		{ keys: "j", label: t.generate.keys.next, group, run: () => step(1) },
		{ keys: "u", label: t.generate.keys.use, group, run: () => shown && usePicture(shown) },
		{ keys: "Delete", label: t.generate.keys.remove, group, run: () => shown && removePicture(shown) },
	]);
	return html`<h1 class="visually-hidden">${t.generate.title}</h1>
		<div class="generate">
			<form
				class="generate-form card"
				onSubmit=${(/** @type {Event} */ event) => {
					event.preventDefault();
					submit();
				}}
			>
				<${Form} draft=${draft} />
				<div class="generate-submit">
					<${Seed} draft=${draft} />
					<${Button} kind="primary" size="large" type="submit" busy=${busy}>${current ? t.generate.submitMore : t.generate.submit}<//>
				</div>
			</form>
			<div class="generate-result">
				<div class="generate-stage card">
					${shown ? html`<${Finished} key=${keyOf(shown)} picture=${shown} />` : current ? html`<${Running} key=${current.id} job=${current} />` : ended && html`<${Nothing} />`}
				</div>
				${ended && html`<${Gallery} pictures=${pictures} selected=${shown ? keyOf(shown) : null} onSelect=${(/** @type {any} */ picture) => setSelected(keyOf(picture))} />`}
			</div>
		</div>
		${over && html`<div class="drop-veil">${t.generate.dropHint}</div>`}`;
}

/**
 * Put the settings of a picture into the form, with a line for each thing that is missing.
 * @param {File} file
 */
async function restore(file) {
	/** @type {PictureSettings} */
	const { settings, loras, warnings } = await api("/v1/pictures/settings", { method: "POST", body: file });
	const library = app.get().loras;
	let prompt = settings.prompt ?? "";
	for (const { reference, id, name } of loras) {
		const lora = library?.find((each) => each.id === id);
		const here = lora ? tagName(lora, library) : name;
		const tag = parseTags(prompt).find((each) => each.name === reference);
		const choice = settings.loras?.find((each) => (each.name ?? each.hash) === reference);
		if (tag) prompt = prompt.slice(0, tag.start) + formatTag(here, tag.te, tag.unet) + prompt.slice(tag.end);
		else if (choice)
			prompt =
				`${prompt} ${formatTag(here, choice.te ?? choice.strength ?? 1, choice.unet ?? choice.strength ?? 1)}`.trim();
	}
	draft.take({ ...settings, prompt });
	if (warnings.length) toast(t.generate.restoredWarnings, { kind: "warning", details: warnings });
	else toast(t.generate.restored);
}
