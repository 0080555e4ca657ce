// The shared state: worker, library, queue. Only lib/session.js, lib/worker.js and lib/jobs.js write it.
import {createStore} from "./store.js"

/** @type {Store<AppState>} */
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
		progress: {}
	})
)
