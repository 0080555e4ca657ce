// The pictures of a table, made once each: the same request is the same picture.
import { ApiError } from "../../lib/api.js";
import { cancelJob, submitJob, waitForJob } from "../../lib/jobs.js";
import { app } from "../../lib/state.js";
import { createStore } from "../../lib/store.js";
import { findModel } from "../../lib/worker.js";

/** @typedef {{ image?: any, preview?: string, error?: string }} Cell */
export const cells = createStore({ made: /** @type {Record<string, Cell>} */ ({}), left: 0 });

/** @param {Record<string, any>} request */
export const cellKey = (request) => JSON.stringify(request);

let current = { jobs: /** @type {Set<string>} */ (new Set()), stopped: true };

/**
 * Make what is missing, first row first; a run that is started meanwhile takes over.
 * @param {import("./sheet.js").Sheet | null} sheet
 * @param {boolean} previews whether to show what a picture will be: early, but each costs as much as several steps
 */
export async function run(sheet, previews) {
	if (!sheet) return;
	await stop();
	const mine = { jobs: new Set(), stopped: false };
	current = mine;
	const missing = sheet.rows.flat().filter((request) => !cells.get().made[cellKey(request)]?.image);
	cells.set({ left: missing.length });
	try {
		const jobs = [];
		for (const request of missing) {
			if (mine.stopped) return;
			const steps = request.steps ?? findModel(app.get().capabilities, request.model)?.defaults?.steps ?? 20;
			const id = await submitJob(previews && steps > 5 ? { ...request, preview_every: Math.ceil(steps / 3) } : request);
			mine.jobs.add(id);
			jobs.push({ id, key: cellKey(request) });
		}
		for (const { id, key } of jobs) {
			const job = await waitForJob(id, {
				onEvent: ({ type, image }) =>
					type === "preview" && !mine.stopped && keep(key, { preview: `data:image/png;base64,${image}` }),
			});
			mine.jobs.delete(id);
			if (mine.stopped) return;
			const image = job.result?.images?.[0];
			keep(key, image ? { image } : { error: job.error?.message ?? job.state });
			cells.set({ left: mine.jobs.size });
		}
	} catch (error) {
		if (!mine.stopped || !(error instanceof ApiError)) throw error;
	} finally {
		if (current === mine) await stop();
	}
}

/**
 * @param {string} key
 * @param {Cell} cell
 */
const keep = (key, cell) => cells.set(({ made }) => ({ made: { ...made, [key]: cell } }));

/** Cancel what is not made yet. */
export async function stop() {
	const { jobs } = current;
	current.stopped = true;
	cells.set({ left: 0 });
	await Promise.all([...jobs].map((id) => cancelJob(id)));
	jobs.clear();
}
