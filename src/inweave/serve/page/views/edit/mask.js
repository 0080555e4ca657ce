// A mask of the size of its image; opaque pixels are repainted. It keeps its changes, for undo and redo.
//
// A change holds the previous pixels of its rectangle; undoing restores them and keeps those that they replace.
import {toPng} from "../../kit.js"

/** bytes of changes that are kept */
const HISTORY = 256 * 2 ** 20

/** @param {number} width @param {number} height */
export function createCanvas(width, height) {
	const canvas = Object.assign(document.createElement("canvas"), {width, height})
	return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", {willReadFrequently: true}))
}

/** The worker's rule: a pixel counts from one half on. @param {ImageData} image */
function count({data}) {
	let painted = 0
	for (let at = 3; at < data.length; at += 4) painted += data[at] >> 7
	return painted
}

export class Mask {
	/** @param {number} width @param {number} height @param {() => void} onChange */
	constructor(width, height, onChange) {
		this.context = createCanvas(width, height)
		this.before = createCanvas(width, height) // the state before the current stroke
		this.onChange = onChange
		this.painted = 0 // pixels that are repainted
		/** @type {Change[]} */
		this.undos = []
		/** @type {Change[]} */
		this.redos = []
		/** the part that the stroke has touched @type {Rect | null} */
		this.touched = null
	}

	get canvas() {
		return this.context.canvas
	}

	get whole() {
		return {x: 0, y: 0, width: this.canvas.width, height: this.canvas.height}
	}

	/** @param {Point} from @param {Point} to @param {number} width @param {boolean} erase */
	line(from, to, width, erase) {
		const {context} = this
		context.globalCompositeOperation = erase ? "destination-out" : "source-over"
		context.lineCap = "round"
		context.lineWidth = width
		context.beginPath()
		context.moveTo(from.x, from.y)
		context.lineTo(to.x, to.y)
		context.stroke()
		this.touch(from, to, width)
		this.onChange()
	}

	/** @param {Point} from @param {Point} to @param {number} width */
	touch(from, to, width) {
		const reach = width / 2 + 2
		const {whole, touched: old} = this
		const left = Math.max(0, Math.min(from.x - reach, to.x - reach, old?.x ?? whole.width))
		const top = Math.max(0, Math.min(from.y - reach, to.y - reach, old?.y ?? whole.height))
		const right = Math.max(from.x + reach, to.x + reach, old ? old.x + old.width : 0)
		const bottom = Math.max(from.y + reach, to.y + reach, old ? old.y + old.height : 0)
		const x = Math.floor(left)
		const y = Math.floor(top)
		const rect = {
			x,
			y,
			width: Math.min(whole.width, Math.ceil(right)) - x,
			height: Math.min(whole.height, Math.ceil(bottom)) - y
		}
		if (rect.width > 0 && rect.height > 0) this.touched = rect // else it is outside of the image
	}

	/** Make the lines since the last change one change. */
	commit() {
		const rect = this.touched
		if (!rect) return
		this.touched = null
		const pixels = this.before.getImageData(rect.x, rect.y, rect.width, rect.height)
		this.painted += this.settle(rect) - count(pixels)
		this.undos.push({rect, pixels})
		this.redos = []
		let bytes = 0
		const forgotten = this.undos.findLastIndex(each => {
			bytes += each.pixels.data.length
			return bytes > HISTORY
		})
		this.undos.splice(0, Math.min(forgotten + 1, this.undos.length - 1))
		this.onChange()
	}

	/** Discard the lines since the last change. */
	revert() {
		const rect = this.touched
		if (!rect) return
		this.touched = null
		this.context.putImageData(this.before.getImageData(rect.x, rect.y, rect.width, rect.height), rect.x, rect.y)
		this.onChange()
	}

	/** Make a rectangle the state before the next stroke. Returns its painted pixels. @param {Rect} rect */
	settle({x, y, width, height}) {
		const pixels = this.context.getImageData(x, y, width, height)
		this.before.putImageData(pixels, x, y)
		return count(pixels)
	}

	/** @param {Change[]} from @param {Change[]} to */
	swap(from, to) {
		this.revert()
		const change = from.pop()
		if (!change) return
		const {rect, pixels} = change
		const now = this.context.getImageData(rect.x, rect.y, rect.width, rect.height)
		this.context.putImageData(pixels, rect.x, rect.y)
		this.painted += this.settle(rect) - count(now)
		to.push({rect, pixels: now})
		this.onChange()
	}

	undo() {
		this.swap(this.undos, this.redos)
	}

	redo() {
		this.swap(this.redos, this.undos)
	}

	/** Change all of it at once. @param {Painter} paint */
	all(paint) {
		this.revert()
		const {width, height} = this.whole
		this.context.save()
		paint(this.context, width, height)
		this.context.restore()
		this.touched = this.whole
		this.commit()
	}

	clear() {
		if (this.painted) this.all((context, width, height) => context.clearRect(0, 0, width, height))
	}

	invert() {
		this.all((context, width, height) => {
			context.globalCompositeOperation = "xor"
			context.fillRect(0, 0, width, height)
		})
	}

	/** Mask the transparent parts of an image. @param {CanvasImageSource} image */
	takeAlpha(image) {
		this.all((context, width, height) => {
			context.globalCompositeOperation = "source-over"
			context.fillRect(0, 0, width, height)
			context.globalCompositeOperation = "destination-out"
			context.drawImage(image, 0, 0)
		})
	}

	/** Take a black-and-white mask, as `toBlob` writes it. @param {CanvasImageSource} source */
	takeWhite(source) {
		const {width, height} = this.whole
		const copy = createCanvas(width, height)
		copy.drawImage(source, 0, 0)
		const image = copy.getImageData(0, 0, width, height)
		for (let at = 0; at < image.data.length; at += 4) image.data[at + 3] = image.data[at]
		copy.putImageData(image, 0, 0)
		this.all(context => {
			context.globalCompositeOperation = "copy"
			context.drawImage(copy.canvas, 0, 0)
		})
	}

	/** A black-and-white PNG of the image's size, exactly as the worker interprets the mask. */
	toBlob() {
		const {width, height} = this.whole
		const image = this.context.getImageData(0, 0, width, height)
		const words = new Uint32Array(image.data.buffer)
		for (let at = 0; at < words.length; at += 1) words[at] = image.data[4 * at + 3] >> 7 ? 0xffffffff : 0xff000000
		const copy = createCanvas(width, height)
		copy.putImageData(image, 0, 0)
		return toPng(copy.canvas)
	}
}
