// A dataset that is open: its pictures, their captions with undo, uploads, the plan of crops, the form of the run.
import { api } from "../../lib/api.js";
import { createStore } from "../../lib/store.js";
import { t } from "../../strings.js";
import { showError } from "../../ui/toast.js";

/**
 * @typedef {{ name: string, caption: string, width: number, height: number, size: number, modified: number }} Picture
 * @typedef {{ id: string, name: string, built_in: boolean, pictures: Picture[] }} Dataset
 * @typedef {{ name: string, bucket: string | null, resized: number[], crop: number[], cropped: number, own_bucket: boolean }} Crop
 * @typedef {{ name: string, model: string, preset: string, trigger: string, prompts: string, overrides: Record<string, any> }} Form
 * @typedef {{ total: number, done: number, failures: { name: string, message: string }[] }} Uploads
 */
const EMPTY = {
	dataset: /** @type {Dataset | null} */ (null),
	crops: /** @type {Map<string, Crop> | null} */ (null),
	undo: /** @type {{ label: string, before: Record<string, string> }[]} */ ([]),
	uploads: /** @type {Uploads | null} */ (null),
	report: /** @type {any} */ (null), // the check of the form as it is
	checking: 0, // the number of the check that is made
};
/** What was checked says nothing of what has changed since, nor does a check that is still being made. */
const STALE = { report: null, checking: 0 };
export const desk = createStore({ ...EMPTY, forms: /** @type {Record<string, Partial<Form>>} */ ({}) });

/** @param {string} id a dataset's, in an address */
export const path = (id) => `/v1/datasets/${id.split("/").map(encodeURIComponent).join("/")}`;

/**
 * @param {string} dataset
 * @param {{ name: string, modified?: number }} picture
 */
export const thumbnail = (dataset, picture) =>
	`${path(dataset)}/pictures/${encodeURIComponent(picture.name)}?thumbnail=true&v=${picture.modified ?? 0}`;

/** @param {string} id */
export async function openDataset(id) {
	const open = desk.get().dataset?.id === id;
	if (!open) desk.set({ ...EMPTY, uploads: desk.get().uploads });
	const dataset = await api(path(id));
	desk.set(open ? { dataset } : { ...EMPTY, uploads: desk.get().uploads, dataset });
}

/** @param {string} name */
export const createDataset = (name) => api("/v1/datasets", { json: { name } });

/**
 * Change the form of a dataset; what was checked before says nothing of it any more.
 * @param {string} id
 * @param {Partial<Form>} patch
 */
export function changeForm(id, patch) {
	desk.set(({ forms }) => ({ ...STALE, forms: { ...forms, [id]: { ...forms[id], ...patch } } }));
}

/**
 * Store captions, remembering those they replace.
 * @param {Record<string, string>} captions
 * @param {string} label what was done, for the undo button
 */
export async function saveCaptions(captions, label) {
	const { dataset } = desk.get();
	if (!dataset || !Object.keys(captions).length) return;
	const { before } = await api(`${path(dataset.id)}/captions`, { method: "PATCH", json: { captions } });
	desk.set(({ undo }) => ({ undo: [...undo.slice(-49), { label, before }], ...STALE }));
	show(captions);
}

export async function undoCaptions() {
	const { dataset, undo } = desk.get();
	const last = undo.at(-1);
	if (!dataset || !last) return;
	await api(`${path(dataset.id)}/captions`, { method: "PATCH", json: { captions: last.before } });
	desk.set({ undo: undo.slice(0, -1), ...STALE });
	show(last.before);
}

/** @param {Record<string, string>} captions */
function show(captions) {
	desk.set(({ dataset }) => ({
		dataset: dataset && {
			...dataset,
			pictures: dataset.pictures.map((each) =>
				each.name in captions ? { ...each, caption: captions[each.name] } : each,
			),
		},
	}));
}

/** @param {string} name */
export async function removePicture(name) {
	const { dataset } = desk.get();
	if (!dataset) return;
	await api(`${path(dataset.id)}/pictures/${encodeURIComponent(name)}`, { method: "DELETE" });
	const pictures = dataset.pictures.filter((each) => each.name !== name);
	const undo = desk.get().undo.map((each) => {
		const { [name]: _, ...before } = each.before;
		return { ...each, before };
	});
	desk.set({
		dataset: { ...dataset, pictures },
		...STALE,
		undo: undo.filter((each) => Object.keys(each.before).length),
	});
}

const PARALLEL = 2;

/**
 * Send pictures one by one; text files beside them are their captions.
 * @param {string} id
 * @param {File[]} files
 */
export async function addFiles(id, files) {
	const texts = files.filter((file) => /\.(txt|caption)$/i.test(file.name));
	const pictures = files.filter((file) => !texts.includes(file));
	const taken = new Set(
		desk.get().dataset?.id === id ? desk.get().dataset?.pictures.map((each) => stem(each.name)) : [],
	);
	/** @type {Map<string, string>} the stem of a file and of the picture it became */
	const names = new Map([...taken].map((each) => [each, each]));
	const waiting = pictures.map((file) => {
		let name = clean(stem(file.name));
		for (let number = 2; taken.has(name); number += 1) name = `${clean(stem(file.name))}-${number}`;
		taken.add(name);
		names.set(stem(file.name), name);
		return { file, name };
	});
	desk.set({ uploads: { total: pictures.length, done: 0, failures: [] }, ...STALE });
	/** @param {{ name: string, message: string } | null} failure */
	const count = (failure) =>
		desk.set(({ uploads }) => ({
			uploads: uploads && {
				...uploads,
				done: uploads.done + 1,
				failures: failure ? [...uploads.failures, failure] : uploads.failures,
			},
		}));
	const send = async () => {
		for (let next = waiting.shift(); next; next = waiting.shift()) {
			const { file, name } = next;
			try {
				await api(`${path(id)}/pictures/${encodeURIComponent(name)}.png`, { method: "PUT", body: file });
				count(null);
			} catch (/** @type {any} */ error) {
				count({ name: file.name, message: error.message });
				names.delete(stem(file.name));
			}
		}
	};
	await Promise.all(Array.from({ length: PARALLEL }, send));
	await openDataset(id);
	/** @type {Record<string, string>} */
	const captions = {};
	for (const file of texts) {
		const name = names.get(stem(file.name));
		if (name) captions[`${name}.png`] = (await file.text()).trim();
	}
	await saveCaptions(captions, t.train.captions.fromFiles).catch(showError);
	const { uploads } = desk.get();
	if (uploads && !uploads.failures.length) desk.set({ uploads: null });
}

/** @param {string} name */
export const stem = (name) => name.replace(/\.[^.]*$/, "");

/** @param {string} name letters, digits, spaces, dots, dashes and underscores, as the worker stores them */
const clean = (name) =>
	name
		.replace(/[^\p{L}\p{N}_ .-]/gu, "-")
		.replace(/^[^\p{L}\p{N}_]+/u, "")
		.slice(0, 100)
		.replace(/[ .]+$/, "") || t.train.picture;
