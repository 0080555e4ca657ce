// The form: what the next picture will be made of. It survives changes of view and reloads, and the address carries it.
import { submitJob } from "../../lib/jobs.js";
import { currentParams, remember, route } from "../../lib/router.js";
import { app } from "../../lib/state.js";
import { createStore, persisted } from "../../lib/store.js";
import { findModel } from "../../lib/worker.js";
import { t } from "../../strings.js";
import { toast } from "../../ui/toast.js";

/**
 * @typedef {object} Draft
 * @property {string} prompt
 * @property {string} negative_prompt
 * @property {string} [model]
 * @property {number} [seed]
 * @property {boolean} locked     whether the next picture has the same seed
 * @property {number} [steps]
 * @property {number} [guidance]
 * @property {number} [width]
 * @property {number} [height]
 * @property {number} [clip_skip]
 * @property {number} [count]
 * @property {string} [sampler]
 * @property {string} [schedule]
 */

const NUMBERS = /** @type {const} */ (["seed", "steps", "guidance", "width", "height", "clip_skip", "count"]);
const TEXTS = /** @type {const} */ (["prompt", "negative_prompt", "model", "sampler", "schedule"]);
/** @type {Draft} */
const EMPTY = { prompt: "", negative_prompt: "", locked: false };
const stored = persisted("draft", EMPTY);

export const draft = createStore(
  /** @type {Draft} */ (
    Object.keys(route.get().params).length ? fromParams(route.get().params) : { ...EMPTY, ...stored.read() }
  ),
);

/**
 * @param {Record<string, string>} params
 * @returns {Draft}
 */
function fromParams(params) {
  /** @type {Record<string, any>} */
  const fields = { ...EMPTY };
  for (const name of TEXTS) if (params[name]) fields[name] = params[name];
  for (const name of NUMBERS)
    if (params[name] && Number.isFinite(Number(params[name]))) fields[name] = Number(params[name]);
  fields.locked = fields.seed !== undefined;
  return /** @type {Draft} */ (fields);
}

/** The fields that are set, as an address and as a request name them. */
function fields() {
  const state = /** @type {Record<string, any>} */ (draft.get());
  return Object.fromEntries(
    [...TEXTS, ...NUMBERS]
      .filter((name) => state[name] !== undefined && state[name] !== "")
      .map((name) => [name, state[name]]),
  );
}

let timer = 0;
draft.subscribe(() => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    stored.write(draft.get());
    const { seed, ...rest } = fields();
    remember("generate", draft.get().locked ? { ...rest, seed } : rest);
  }, 250);
});
route.subscribe(() => {
  const { view } = route.get();
  const params = currentParams();
  if (view === "generate" && Object.keys(params).length) draft.set({ ...blank(), ...fromParams(params) });
});

/** Every field, unset: a patch that leaves nothing of what was there. */
const blank = () => Object.fromEntries([...TEXTS, ...NUMBERS].map((name) => [name, name in EMPTY ? "" : undefined]));

/**
 * Take the settings of a picture; those it does not tell become the model's own.
 * @param {Record<string, any>} settings
 */
export function useSettings(settings) {
  /** @type {Record<string, any>} */
  const patch = { ...blank(), locked: settings.seed !== undefined };
  for (const name of [...TEXTS, ...NUMBERS])
    if (settings[name] !== undefined && settings[name] !== null) patch[name] = settings[name];
  if (patch.count === 1) patch.count = undefined;
  draft.set(/** @type {Partial<Draft>} */ (patch));
}

export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

/** Jobs of this tab whose failure is worth a message. @type {Set<string>} */
const mine = new Set();

/** Queue what the form says. */
export async function generate() {
  const state = draft.get();
  if (!state.locked || state.seed === undefined) draft.set({ seed: randomSeed() });
  const request = fields();
  const steps = request.steps ?? findModel(app.get().capabilities, request.model)?.defaults?.steps ?? 20;
  mine.add(
    await submitJob({ operation: "image_generation", ...request, preview_every: Math.max(1, Math.round(steps / 6)) }),
  );
}

app.subscribe(() => {
  for (const job of app.get().ended ?? []) {
    if (!mine.delete(job.id)) continue;
    if (job.state === "failed" && job.error) toast(job.error.message, { kind: "error" });
    const warnings = [...job.warnings, ...(job.result?.warnings ?? [])];
    if (warnings.length) toast(t.generate.withWarnings, { kind: "warning", details: warnings });
  }
});
