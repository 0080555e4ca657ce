// Generate: the form, the picture, the gallery.
import { api } from "../lib/api.js";
import { html, useState } from "../lib/dom.js";
import { cancelJob } from "../lib/jobs.js";
import { useShortcuts } from "../lib/keys.js";
import { formatTag, parseTags, tagName } from "../lib/prompt.js";
import { app } from "../lib/state.js";
import { useStore } from "../lib/store.js";
import { findModel } from "../lib/worker.js";
import { t } from "../strings.js";
import { Button } from "../ui/button.js";
import { usePageDrop } from "../ui/dropzone.js";
import { Field, NumberField, Select } from "../ui/field.js";
import { showError, toast } from "../ui/toast.js";
import { draft, generate, randomSeed, useSettings } from "./generate/draft.js";
import { Gallery, keyOf, picturesOf } from "./generate/gallery.js";
import { Picker, Stack, Triggers } from "./generate/loras.js";
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
    generate()
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
        <${Form} />
        <div class="generate-submit">
          <${Seed} />
          <${Button} kind="primary" size="large" type="submit" busy=${busy}>${current ? t.generate.submitMore : t.generate.submit}<//>
        </div>
      </form>
      <div class="generate-result">
        <div class="generate-stage card">
          ${shown ? html`<${Finished} key=${keyOf(shown)} picture=${shown} />` : current ? html`<${Running} key=${current.id} job=${current} />` : ended && html`<${Nothing} />`}
        </div>
        <${Gallery} pictures=${pictures} selected=${shown ? keyOf(shown) : null} onSelect=${(/** @type {any} */ picture) => setSelected(keyOf(picture))} />
      </div>
    </div>
    ${over && html`<div class="drop-veil">${t.generate.dropHint}</div>`}`;
}

function Form() {
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
    <section class="stack" aria-labelledby="loras-title">
      <h2 id="loras-title" class="section-title">${t.generate.loras}</h2>
      <${Stack} prompt=${state.prompt} onPrompt=${onPrompt} />
      <${Picker} prompt=${state.prompt} onPrompt=${onPrompt} model=${state.model} />
    </section>
    <${Settings} />
  </div>`;
}

function Settings() {
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
        <${NumberField} label=${t.generate.width} min=${8} step=${8} value=${state.width} onChange=${set("width")} placeholder=${String(defaults?.size ?? "")} />
        <${NumberField} label=${t.generate.height} min=${8} step=${8} value=${state.height} onChange=${set("height")} placeholder=${String(defaults?.size ?? "")} />
        <${Select} label=${t.generate.sampler} value=${state.sampler ?? ""} options=${[own, ...(capabilities?.samplers ?? [])]} onChange=${set("sampler")} />
        <${Select} label=${t.generate.schedule} value=${state.schedule ?? ""} options=${[own, ...(capabilities?.schedules ?? [])]} onChange=${set("schedule")} />
        <${NumberField} label=${t.generate.clipSkip} min=${1} max=${12} value=${state.clip_skip} onChange=${set("clip_skip")} placeholder=${t.generate.own} />
      </div>
      ${changed.length > 0 && html`<button type="button" class="link small" onClick=${() => draft.set(Object.fromEntries(changed.map((name) => [name, undefined])))}>${t.generate.reset}</button>`}
    </div>
  </details>`;
}

function Seed() {
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

/**
 * Put the settings of a picture into the form, with a line for each thing that is missing.
 * @param {File} file
 */
async function restore(file) {
  /** @type {import("../lib/types.js").PictureSettings} */
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
  useSettings({ ...settings, prompt, loras: undefined });
  if (warnings.length) toast(t.generate.restoredWarnings, { kind: "warning", details: warnings });
  else toast(t.generate.restored);
}
