// What is compared: a form becomes a table of requests, all with the same settings but for what its row and column say.
import { strength as written } from "../../lib/format.js";
import { t } from "../../strings.js";

/**
 * @typedef {{ name: string, strength: number, te?: number, unet?: number }} Choice
 * @typedef {{ mode: string, prompt: string, seed: number, steps?: number, count: number, loras: Choice[], more: Record<string, any> }} Form
 * @typedef {{ columns: string[], labels: string[], rows: Record<string, any>[][] }} Sheet
 */
export const MODES = ["without", "sweep", "pairs", "seeds"];
const NUMBERS = ["guidance", "width", "height", "clip_skip"];
const TEXTS = ["negative_prompt", "sampler", "schedule", "model"];
const TAG = /<lora:([^:>]+)(?::([^>]*))?>/g;

/**
 * @param {Record<string, string>} params
 * @returns {Form}
 */
export function formOf(params) {
	const number = (/** @type {string} */ name) =>
		Number.isFinite(Number(params[name] || "x")) ? Number(params[name]) : undefined;
	/** @type {Record<string, any>} */
	const more = {};
	for (const name of NUMBERS) if (number(name) !== undefined) more[name] = number(name);
	for (const name of TEXTS) if (params[name]) more[name] = params[name];
	let loras = [];
	try {
		loras = JSON.parse(params.loras ?? "[]").filter(
			(/** @type {any} */ each) => typeof each?.name === "string" && Number.isFinite(each.strength),
		);
	} catch {
		// an address that was cut off
	}
	return extractTags({
		mode: MODES.includes(params.mode) ? params.mode : "without",
		prompt: params.prompt ?? t.compare.example,
		seed: number("seed") ?? 7,
		steps: number("steps"),
		count: Math.max(2, Math.min(8, number("count") ?? 4)),
		loras,
		more,
	});
}

/** @param {Form} form */
export const formAddress = ({ mode, prompt, seed, steps, count, loras, more }) => ({
	mode: mode === "without" ? "" : mode,
	prompt,
	seed,
	steps,
	count: count === 4 ? "" : count,
	loras: loras.length ? JSON.stringify(loras) : "",
	...more,
});

/**
 * The settings of a picture that was made, with the LoRAs that were applied to it.
 * @param {any} job
 * @param {number} index
 * @returns {Form}
 */
export function formOfJob(job, index) {
	const image = job.result?.images?.[index];
	const settings = { ...job.settings, ...image?.settings };
	const more = Object.fromEntries(
		[...NUMBERS, ...TEXTS]
			.filter((name) => settings[name] !== undefined && settings[name] !== null)
			.map((name) => [name, settings[name]]),
	);
	const loras = (job.result?.loras ?? []).map((/** @type {any} */ each) => ({
		name: each.name,
		strength: each.unet,
		...(each.te === each.unet ? {} : { te: each.te, unet: each.unet }),
	}));
	const prompt = String(settings.prompt ?? "")
		.replace(TAG, "")
		.trim();
	return {
		mode: "without",
		prompt,
		seed: image?.seed ?? settings.seed ?? 7,
		steps: settings.steps,
		count: 4,
		loras,
		more: { ...more, model: job.model },
	};
}

/**
 * Tags in the prompt become choices, so that a picture without LoRAs has none.
 * @param {Form} form
 */
export function extractTags(form) {
	const tags = [...form.prompt.matchAll(TAG)];
	if (!tags.length) return form;
	const loras = tags.map(([, name, text = ""]) => {
		const [te = 1, unet] = text.split(":").map(Number).filter(Number.isFinite);
		return unet === undefined ? { name, strength: te } : { name, strength: unet, te, unet };
	});
	return {
		...form,
		prompt: form.prompt.replace(TAG, "").trim(),
		loras: [...form.loras.filter((each) => !loras.some((tag) => tag.name === each.name)), ...loras],
	};
}

/**
 * @param {Form} form
 * @param {Choice[]} loras
 * @param {number} [seed]
 */
const request = ({ prompt, steps, more, seed: own }, loras, seed = own) => ({
	...more,
	prompt,
	seed,
	...(steps === undefined ? {} : { steps }),
	loras: loras.map(({ name, strength, te, unet }) => (te === undefined ? { name, strength } : { name, te, unet })),
});

/** @param {Form} form the table of its mode; null where something is missing */
export function sheetOf(form) {
	const { mode, loras, count } = form;
	if (!loras.length) return null;
	const spread = (/** @type {number} */ to, /** @type {number} */ n) =>
		Array.from({ length: n }, (_, i) => Math.round((to * i * 100) / (n - 1)) / 100);
	const names = loras.map((each) => each.name).join(" + ");
	if (mode === "sweep") {
		const [first, ...rest] = loras;
		const strengths = spread(first.strength || 1, count);
		return {
			columns: strengths.map(written),
			labels: [first.name],
			rows: [strengths.map((strength) => request(form, [{ name: first.name, strength }, ...rest]))],
		};
	}
	if (mode === "pairs") {
		if (loras.length < 2) return null;
		const [first, second, ...rest] = loras;
		const down = spread(first.strength || 1, Math.min(count, 4));
		const across = spread(second.strength || 1, Math.min(count, 4));
		return {
			columns: across.map((value) => `${second.name} ${written(value)}`),
			labels: down.map((value) => `${first.name} ${written(value)}`),
			rows: down.map((a) =>
				across.map((b) =>
					request(form, [{ name: first.name, strength: a }, { name: second.name, strength: b }, ...rest]),
				),
			),
		};
	}
	if (mode === "seeds") {
		const seeds = Array.from({ length: count }, (_, index) => form.seed + index);
		return {
			columns: seeds.map((seed) => t.compare.seedOf(seed)),
			labels: [t.compare.without, names],
			rows: [seeds.map((seed) => request(form, [], seed)), seeds.map((seed) => request(form, loras, seed))],
		};
	}
	return { columns: [t.compare.without, names], labels: [""], rows: [[request(form, []), request(form, loras)]] };
}
