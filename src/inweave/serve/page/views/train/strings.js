// The texts of Train.
import {counted} from "../../strings.js"

/** @satisfies {Phrases["train"]} */
export const t = {
	title: "Train",
	text: "Teach the model a style, a character or an object: drop images, caption them, train, use the LoRA.",
	never: "Training is disabled on this worker.",
	drop: "Drop or choose training images",
	dropHint: "PNG, JPEG, WebP or BMP, or a folder of them; .txt files of the same names become captions",
	draw: "Draw shapes",
	drawText: "No images at hand? Draw a dozen shapes and train on them; it takes a few minutes.",
	add: "Add images",
	newName: n => `Dataset ${n}`,
	name: "Dataset name",
	datasets: "Your datasets",
	examples: "Examples",
	runs: "Runs",
	count: n => counted(n, "image"),
	fixed: "This built-in example is read-only. Go back to Train and drop your own images there.",
	gone: "Dataset not found",
	delete: "Delete this dataset",
	deleteTitle: name => `Delete ${name}?`,
	deleteText: "This removes its images and captions from the worker. LoRAs trained on it are kept.",
	emptyTitle: "No images yet",
	emptyText: "Drop some anywhere on this page. A dozen is enough to start.",
	image: "image",
	sending: (done, total) => `Uploading and checking: ${done} of ${total}`,
	ignored: n =>
		n === 1 ? "skipped: not an image or a caption" : `this and ${n - 1} more skipped: not images or captions`,
	noImage: "no image of the same name was dropped with it",
	planning: "Planning the crops…",
	bucket: (size, n) => `${size.replace("x", " × ")} · ${counted(n, "image")}`,
	tooSmall: n => `Too small, skipped: ${counted(n, "image")}. Add larger ones.`,
	tooSmallImage: "Too small: skipped",
	cropped: percent => `${percent}% cropped`,
	toRun: "Settings and start",
	remove: name => `Remove ${name}`,
	captionOf: name => `Caption of ${name}`,
	noCaption: "Describe this image",
	captions: {
		bulk: "Edit all captions",
		mode: "Operation",
		modes: /** @type {Labels} */ ({
			prefix: "Prefix",
			suffix: "Suffix",
			replace: "Replace",
			remove: "Remove tag"
		}),
		fields: /** @type {Labels} */ ({
			prefix: "Prepend to every caption",
			suffix: "Append to every caption",
			replace: "Text to replace",
			remove: "Tag to remove"
		}),
		separator: "Separator",
		separators: /** @type {[string, string][]} */ ([
			[", ", "Comma"],
			[" ", "Space"],
			[". ", "Period"],
			["", "None"]
		]),
		by: "Replace with",
		apply: n => `Change ${counted(n, "caption")}`,
		tags: "Tags, with the number of captions that have them",
		choose: "Use this tag above",
		more: n => `and ${n} more`,
		undo: label => `Undo: ${label}`,
		undoKey: "Undo the last caption change",
		fromFiles: "captions from files",
		model: "Caption with a local model",
		which: "Images",
		whiches: {missing: "Without a caption", all: "All"},
		question: "Instruction",
		questionHint: "For models that follow one",
		write: n => `Caption ${counted(n, "image")}`,
		writing: (done, total) => `Captioning: ${done} of ${total}`,
		stop: "Stop",
		noModel: "To have images captioned by a model on this machine, start the worker with --captioner FOLDER."
	},
	setup: {
		title: "New run",
		name: "LoRA name",
		base: "Base",
		preset: "Preset",
		presets: /** @type {Labels} */ ({
			style: "Style: how things are drawn",
			subject: "Subject: a person, character or object",
			quick: "Quick: a first impression",
			thorough: "Thorough: longer training"
		}),
		presetHint: (steps, rank) => `${counted(steps, "step")}, rank ${rank}`,
		trigger: "Trigger word",
		triggerHint: "Optional: activates the LoRA; prepended to every caption",
		more: "More settings",
		own: "Model default",
		settings: /** @type {Labels} */ ({
			steps: "Steps",
			rank: "Rank",
			learning_rate: "Learning rate",
			batch_size: "Batch size",
			resolution: "Resolution",
			save_every: "Checkpoint every N steps",
			sample_every: "Sample every N steps",
			seed: "Seed",
			validation_split: "Validation share",
			network: "Algorithm",
			optimizer: "Optimizer",
			lr_scheduler: "Learning-rate schedule"
		}),
		prompts: "Sample prompts",
		promptsHint: "One per line; default: the first captions",
		checkHint: "Memory, time and problems appear here once there are images.",
		check: "Check again",
		ready: time => (time ? `Ready to start: about ${time}` : "Ready to start"),
		problems: n => `${counted(n, "problem")}: show`,
		checking: "Checking…",
		start: "Start training"
	},
	report: {
		title: "Check results",
		memory: "Memory",
		of: (needed, total, device) => `${needed} of ${total} (${device})`,
		time: "Time",
		about: time => `about ${time}`,
		steps: "Steps",
		epochs: (steps, epochs) => `${steps}: each image ${epochs < 1.5 ? "once" : `${Math.round(epochs)} times`}`,
		buckets: "Resolutions",
		good: "Ready to start."
	},
	run: {
		states: {
			queued: "waiting",
			running: "training",
			pausing: "pausing after this step",
			done: "done",
			failed: "failed",
			cancelled: "paused"
		},
		gone: "Run not found",
		back: "Back to Train",
		dataset: "dataset",
		use: "Use now",
		useStep: step => `Use step ${step}`,
		waits: "Added to the prompt. Image jobs wait until training ends or is paused.",
		pause: "Pause",
		resume: "Resume",
		again: "Retry",
		extend: "Train longer",
		extendText: done =>
			`${counted(done, "step")} ${done === 1 ? "is" : "are"} done; training continues from there. The learning-rate schedule is stretched to the new length.`,
		extendTo: "Total steps",
		loss: "Loss",
		samples: "Samples",
		noSamples: "Samples appear here during training.",
		sampleOf: (prompt, step) => `${prompt}, after step ${step}`,
		step: step => `Step ${step}`,
		play: "Play the samples as a time-lapse",
		stop: "Pause the time-lapse",
		checkpoints: "Checkpoints",
		best: "Best",
		bestBy: validation =>
			validation
				? "Best: the lowest validation loss."
				: "Best: the lowest running average of the loss. Look at the images too: a low loss may also be a LoRA that learned its images by heart.",
		lossOf: (value, validation) => `${validation ? "validation loss" : "average loss"} ${value}`,
		imageOf: step => `A sample after step ${step}`,
		notes: n => counted(n, "note")
	},
	chart: {
		empty: "The loss appears here after the first steps.",
		summary: (first, from, last, to, least) =>
			`Running average of the loss: ${from} at step ${first}, ${to} at step ${last}, minimum ${least}.`,
		lossAxis: "Loss",
		stepAxis: "Step",
		step: step => `Step ${step}`,
		loss: value => `loss ${value}`,
		validation: value => `validation ${value}`,
		average: value => `running average ${value}`
	},
	pad: {
		title: "Draw a dozen shapes",
		text: "Draw with a mouse, pen or finger, or use the stamps. Follow the idea or write your own caption, then draw the next one.",
		name: "My drawings",
		file: "drawing",
		canvas: n => (n ? `Your drawing, ${counted(n, "stroke")}` : "Empty canvas"),
		color: "Color",
		colors: ["Ink", "Red", "Yellow", "Green", "Blue", "Purple"],
		size: "Brush size",
		stamp: "Stamps",
		stamps: /** @type {Labels} */ ({
			circle: "circle",
			square: "square",
			triangle: "triangle",
			star: "star",
			flower: "flower"
		}),
		clear: "Clear",
		caption: "Caption",
		of: what => `a drawing of a ${what}`,
		ideas: ["sun", "tree", "house", "fish", "star", "cat", "cup", "flower", "boat", "heart", "moon", "snail"].map(
			each => `a drawing of a ${each}`
		),
		add: n => `Add drawing ${n}`,
		done: "Done",
		added: n => (n >= 12 ? `${n} drawings: enough to train on.` : `${n} of 12 drawings. Fewer also work.`)
	}
}
