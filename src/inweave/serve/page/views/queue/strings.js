// The texts of Queue.
import {counted} from "../../strings.js"

/** @satisfies {Phrases["queue"]} */
export const t = {
	title: "Queue",
	text: "Running and waiting jobs, from this page and every other client.",
	pause: "Pause the queue",
	resume: "Resume the queue",
	paused: "The queue is paused: the running job finishes, the others wait.",
	running: "Running",
	waiting: "Waiting",
	ended: "History",
	emptyTitle: "All done",
	emptyText: "No jobs are running or waiting.",
	emptyAction: "Generate an image",
	devices: "Devices",
	resources: node => [node.gpus > 0 && counted(node.gpus, "GPU"), counted(node.cpus, "CPU")].filter(Boolean).join(", "),
	gone: "lost",
	unplaced: "On no machine yet",
	statuses: /** @type {Labels} */ ({
		running: "running",
		starting: "starting",
		loading: "loading",
		ready: "ready",
		failed: "failed",
		stopping: "stopping"
	}),
	roles: /** @type {Labels} */ ({training: "training only", images: "images only"}),
	holds: names => `In memory: ${names.join(", ")}`,
	holdsNothing: "Nothing in memory",
	waitsFor: reason => `Why it waits: ${reason}`,
	cancel: what => `Cancel ${what}`,
	first: "Run next",
	move: what => `Move ${what}: drag, or press the up and down arrow keys`,
	retry: "Run again",
	forget: "Remove from the list",
	noPrompt: "no prompt",
	training: name => `Train ${name}`,
	operations: {
		image_generation: "Generate",
		image_transform: "Image to image",
		image_inpaint: "Inpaint",
		train: "Train"
	},
	states: {
		queued: "waiting",
		running: "running",
		done: "done",
		failed: "failed",
		cancelled: "cancelled"
	},
	images: n => counted(n, "image"),
	attempts: "restarted after a worker crash",
	advice: /** @type {Labels} */ ({
		out_of_memory: "Try fewer or smaller images, or close other programs that use the device.",
		lora_mismatch: "Choose LoRAs made for this model; the library shows which ones fit.",
		not_found: "A required file is missing; check the LoRAs and the model.",
		timeout: "The job exceeded the worker's time limit (--job-seconds).",
		internal: "See the worker's log for details.",
		worker_restarted: "The worker crashed twice during this job; see its log for details."
	}),
	keys: {pause: "Pause or resume the queue"}
}
