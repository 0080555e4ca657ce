// A mask: what is opaque is repainted. It has the size of its picture, and remembers what was painted, for undo and redo.
//
// A change is kept as the pixels of its rectangle from before; undoing puts them back and keeps those that it replaces.
import {toPng} from "../../kit.js"

/** how many bytes of changes are remembered */
const HISTORY = 256 * 2 ** 20

export function createCanvas(width, height) {
	const canvas = Object.assign(document.createElement("canvas"), {width, height})
	return /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d", {willReadFrequently: true}))
}

/** The worker's rule: half and more counts. @param {ImageData} image */
function count({data}) {
	let painted = 0
	for (let at = 3; at < data.length; at += 4) painted += data[at] >> 7
	return painted
}

export class Mask {
	constructor(width, height, onChange) {
		this.context = createCanvas(width, height)
		this.before = createCanvas(width, height) // as it was before the stroke that is being painted
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

	/** Paint a line; `commit` makes all lines since the last one a single change. */
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
		if (rect.width > 0 && rect.height > 0) this.touched = rect // beside the picture there is nothing to touch
	}

	/** Make what was painted one change. */
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

	/** Give up what was painted since the last change. */
	revert() {
		const rect = this.touched
		if (!rect) return
		this.touched = null
		this.context.putImageData(this.before.getImageData(rect.x, rect.y, rect.width, rect.height), rect.x, rect.y)
		this.onChange()
	}

	/** What is in a rectangle is how it was before the next stroke. Returns how much of it is painted. @param {Rect} rect */
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

	/** Change all of it at once. @param {(context: CanvasRenderingContext2D, width: number, height: number) => void} paint */
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

	/** Repaint what is transparent in a picture. @param {CanvasImageSource} picture */
	takeAlpha(picture) {
		this.all((context, width, height) => {
			context.globalCompositeOperation = "source-over"
			context.fillRect(0, 0, width, height)
			context.globalCompositeOperation = "destination-out"
			context.drawImage(picture, 0, 0)
		})
	}

	/** Take a mask of black and white, as `toImageData` gives it. @param {CanvasImageSource} picture */
	takeWhite(picture) {
		const {width, height} = this.whole
		const copy = createCanvas(width, height)
		copy.drawImage(picture, 0, 0)
		const image = copy.getImageData(0, 0, width, height)
		for (let at = 0; at < image.data.length; at += 4) image.data[at + 3] = image.data[at]
		copy.putImageData(image, 0, 0)
		this.all(context => {
			context.globalCompositeOperation = "copy"
			context.drawImage(copy.canvas, 0, 0)
		})
	}

	/** A PNG of black and white alone, of the picture's size: exactly what the worker makes of it. */
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
