// The texts of what Generate and Edit load when it is opened.
import {texts} from "../../kit.js"

export const t = {
	undo: texts.actions.undo,
	close: texts.actions.close,
	missing: texts.generate.missing,
	styles: "Styles",
	noStyles: "No styles yet: save a prompt as one.",
	manage: "Save or delete styles",
	done: "Done",
	styleName: "Save the prompt as a style",
	styleHint: "{prompt} in it is replaced by the prompt; otherwise it is added after a comma.",
	saveStyle: "Save style",
	/** @param {string} name */
	styleSaved: name => `Style ${name} saved`,
	/** @param {string} name */
	styleRemoved: name => `Style ${name} deleted`,
	/** @param {string} name */
	removeStyle: name => `Delete the style ${name}`,
	wildcards: "Random choices",
	wildcardsText:
		"{red|green} is one of them, __name__ a line of a wildcard file. The seed decides; each image stores its own prompt.",
	upscale: "Upscale (hires fix)",
	off: "Off",
	scale: "Scale",
	upscaler: "Upscaler",
	repaint: "Upscale strength",
	repaintHint: "The image is painted again at the new size; 0.2 to 0.5 adds details and keeps the image.",
	repaintSmall: "This model was trained on small images and may damage a larger one; 0 only enlarges.",
	onlyEnlarge: "At 0 the image is only enlarged.",
	upscaleSteps: "Upscale steps",
	sameSteps: "same",
	grid: "Sheet",
	gridText: "One image for each value, together on one labeled sheet.",
	none: "None",
	across: "Columns",
	down: "Rows",
	values: "Values",
	promptAxis: "The first text is searched for in the prompt; the others replace it.",
	axes: /** @type {Labels} */ ({
		strength: "LoRA strengths",
		seed: "Seed",
		steps: "Steps",
		guidance: "Guidance",
		denoise: "Denoising strength",
		sampler: "Sampler",
		schedule: "Schedule",
		prompt: "Prompt, search and replace",
		style: "Style",
		model: "Model",
		clip_skip: "CLIP skip",
		width: "Width",
		height: "Height"
	}),
	examples: /** @type {Labels} */ ({
		strength: "0, 0.5, 1",
		seed: "1, 2, 3",
		steps: "5, 10, 20",
		guidance: "2, 4, 7",
		denoise: "0.3, 0.5, 0.7",
		prompt: "apple, pear, plum",
		clip_skip: "1, 2",
		width: "96, 128",
		height: "96, 128"
	}),
	noControlNet: "ControlNet is not supported.",
	references: "Reference images",
	addReferences: "Add reference images",
	/** @param {number} most */
	referencesHint: most =>
		most === 1 ? "The model sees one, beside the prompt." : `The model sees up to ${most}, in this order.`,
	/** @param {number} most */
	tooManyReferences: most => `Only ${most} ${most === 1 ? "image fits" : "images fit"}; the others were left out`,
	/** @param {number} number */
	reference: number => `Reference image ${number}`,
	/** @param {number} number */
	removeReference: number => `Remove reference image ${number}`,
	/** @param {number} number */
	earlier: number => `Move reference image ${number} forward`,
	referenceGone: "expired; add it again",
	outpaint: "Extend the image",
	outpaintText: "Pixels to add to each side; the new part is painted and blended into the image.",
	sides: /** @type {Labels} */ ({left: "Left", top: "Top", right: "Right", bottom: "Bottom"}),
	many: "Many images",
	manyText: "Choose or drop several images or a folder: each is transformed with these settings.",
	manyDrop: "Choose images to transform",
	/** @param {number} n */
	queued: n => `${n} ${n === 1 ? "image" : "images"} added to the queue; the results appear in the gallery.`,
	/** @param {string} name */
	unreadable: name => `${name} could not be added`,
	viewer: "Image, full screen",
	zoomIn: "Zoom in",
	zoomOut: "Zoom out",
	whole: "Fit to the window",
	fullScreen: "Full screen",
	/** @param {number} percent */
	zoom: percent => `${percent}%`,
	previous: "Newer image",
	next: "Older image"
}
