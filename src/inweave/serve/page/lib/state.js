// What every view knows: the worker, its library, its queue. Only lib/session.js, lib/worker.js and lib/jobs.js write it.
import { createStore } from "./store.js";

/**
 * @typedef {import("./types.js").Job} Job
 * @typedef {import("./types.js").Lora} Lora
 * @typedef {import("./types.js").Capabilities} Capabilities
 * @typedef {import("./types.js").Progress} Progress
 *
 * @typedef {object} AppState
 * @property {"opening" | "locked" | "open"} session      locked: the worker wants a token that we do not have
 * @property {boolean} tokenRequired
 * @property {boolean} online                             whether the last call reached the worker
 * @property {string | null} notReady                     why a job would not run now, while the model loads
 * @property {Capabilities | null} capabilities
 * @property {Lora[] | null} loras                        null until they are known
 * @property {Job[] | null} active                        running and waiting jobs, in the order they run; null until known
 * @property {boolean} paused                             whether the queue is paused
 * @property {Job[] | null} ended                         jobs that ended, newest first; null until known
 * @property {number | null} endedNext                    where the next page of them starts
 * @property {Record<string, Progress>} progress          of running jobs, by id
 */

/** @type {import("./store.js").Store<AppState>} */
export const app = createStore(
  /** @type {AppState} */ ({
    session: "opening",
    tokenRequired: false,
    online: true,
    notReady: null,
    capabilities: null,
    loras: null,
    active: null,
    paused: false,
    ended: null,
    endedNext: null,
    progress: {},
  }),
);
