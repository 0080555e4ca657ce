// The image with its mask over it: paint with mouse, pen, finger or arrow keys, zoom and pan.
//
// Both canvases have the size of their frame; the mask is drawn unchanged, and a filter does to it what the worker will do:
// a pixel counts from one half on, and feathering fades inside the mask, alpha = 2 * blurred - 1.
import {html, useEffect, useLayoutEffect, useRef, useStore} from "../../kit.js"
import {draft, edit, panBy, placeOf, zoomBy} from "./state.js"
import {t} from "./strings.js"

/** @type {Record<string, number[]>} */
const ARROWS = {
	ArrowLeft: [-1, 0],
	ArrowRight: [1, 0],
	ArrowUp: [0, -1],
	ArrowDown: [0, 1]
}

/** The right mouse button and the back of a pen erase. @param {PointerEvent} event */
const erases = event => edit.get().tool === "eraser" || (event.buttons & 34) !== 0

/** A pen paints with its pressure. @param {PointerEvent} event */
const widthOf = event => Math.max(1, edit.get().size * (event.pointerType === "pen" ? 0.2 + 0.8 * event.pressure : 1))

export function Canvas() {
	const state = useStore(edit)
	const feather = useStore(draft).feather ?? 0
	const frame = useRef(/** @type {HTMLDivElement | null} */ (null))
	const image = useRef(/** @type {HTMLCanvasElement | null} */ (null))
	const overlay = useRef(/** @type {HTMLCanvasElement | null} */ (null))
	const ring = useRef(/** @type {HTMLDivElement | null} */ (null))
	/** @type {Hand} */
	const idle = {pointers: new Map(), mode: "", last: null, erase: false, over: false, space: false, cursor: null}
	const hand = useRef(idle).current
	const {source, mask, box} = state
	const {zoom, left, top} = placeOf(state)

	useLayoutEffect(() => {
		const element = /** @type {HTMLDivElement} */ (frame.current)
		const measure = () => edit.set({box: {width: element.clientWidth, height: element.clientHeight}})
		measure()
		const observer = new ResizeObserver(measure)
		observer.observe(element)
		// Preact's listeners are passive: the page would scroll
		/** @param {WheelEvent} event */
		const wheel = event => {
			if (zoomBy(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), spot(event))) event.preventDefault()
		}
		element.addEventListener("wheel", wheel, {passive: false})
		return () => {
			observer.disconnect()
			element.removeEventListener("wheel", wheel)
			edit.get().mask?.commit()
		}
	}, [])

	// space and drag
	useEffect(() => {
		/** @param {KeyboardEvent} event */
		const key = event => {
			if (event.code !== "Space" || !(event.target instanceof Element)) return
			hand.space = event.type === "keydown" && hand.over && !event.target.matches("textarea, select, .input")
			if (hand.space && !event.target.matches("button, a, summary, input")) event.preventDefault()
		}
		addEventListener("keydown", key)
		addEventListener("keyup", key)
		return () => {
			removeEventListener("keydown", key)
			removeEventListener("keyup", key)
		}
	}, [])

	useLayoutEffect(() => {
		if (source) paint(image.current, source.canvas, !state.camera || zoom < 6)
	}, [source, state.camera, box])
	useLayoutEffect(() => {
		if (mask) paint(overlay.current, state.hidden ? null : mask.canvas, zoom < 1)
	}, [mask, state.version, state.camera, box, state.hidden])

	/** @param {HTMLCanvasElement | null} canvas @param {HTMLCanvasElement | null} from @param {boolean} smooth */
	function paint(canvas, from, smooth) {
		const context = canvas?.getContext("2d")
		if (!canvas || !context) return
		const dots = devicePixelRatio
		canvas.width = Math.round(box.width * dots)
		canvas.height = Math.round(box.height * dots)
		if (!from) return
		context.setTransform(zoom * dots, 0, 0, zoom * dots, left * dots, top * dots)
		context.imageSmoothingEnabled = smooth
		context.imageSmoothingQuality = "high"
		context.drawImage(from, 0, 0)
	}

	/** The point of an event in the frame. @param {MouseEvent} event */
	const spot = event => {
		const edge = /** @type {HTMLDivElement} */ (frame.current).getBoundingClientRect()
		return {x: event.clientX - edge.left, y: event.clientY - edge.top}
	}
	/** ... and in the image. @param {Point} point */
	const inside = ({x, y}) => {
		const place = placeOf(edit.get())
		return {x: (x - place.left) / place.zoom, y: (y - place.top) / place.zoom}
	}
	/** Show the brush. @param {Point | null} point of the frame */
	const show = point => {
		const element = ring.current
		if (!element) return
		element.hidden = !point || edit.get().tool === "hand"
		if (point) element.style.translate = `${point.x}px ${point.y}px`
	}

	/** @param {PointerEvent} event */
	const down = event => {
		if (!mask) return
		frame.current?.setPointerCapture(event.pointerId)
		const point = spot(event)
		hand.pointers.set(event.pointerId, point)
		if (hand.pointers.size > 1) {
			mask.revert() // the first finger did not mean to paint
			hand.mode = "pinch"
		} else if (event.button === 1 || state.tool === "hand" || hand.space) {
			event.preventDefault()
			hand.mode = "pan"
		} else {
			hand.mode = "paint"
			hand.erase = erases(event)
			hand.last = inside(point)
			mask.line(hand.last, hand.last, widthOf(event), hand.erase)
		}
	}
	/** @param {PointerEvent} event */
	const move = event => {
		const point = spot(event)
		show(event.pointerType === "touch" ? null : point)
		const before = hand.pointers.get(event.pointerId)
		if (!before || !mask) return
		if (hand.mode === "paint" && hand.last) {
			const parts = event.getCoalescedEvents?.() ?? []
			for (const part of parts.length ? parts : [event]) {
				const next = inside(spot(part))
				mask.line(hand.last, next, widthOf(part), hand.erase)
				hand.last = next
			}
		} else if (hand.mode === "pan") panBy(point.x - before.x, point.y - before.y)
		else if (hand.mode === "pinch") {
			const other = [...hand.pointers].find(([id]) => id !== event.pointerId)?.[1]
			if (other) {
				/** @param {Point} each */
				const far = each => Math.max(1, Math.hypot(each.x - other.x, each.y - other.y))
				panBy((point.x - before.x) / 2, (point.y - before.y) / 2)
				zoomBy(far(point) / far(before), {x: (point.x + other.x) / 2, y: (point.y + other.y) / 2})
			}
		}
		hand.pointers.set(event.pointerId, point)
	}
	/** @param {PointerEvent} event */
	const up = event => {
		hand.pointers.delete(event.pointerId)
		if (hand.mode === "paint") mask?.commit()
		if (!hand.pointers.size) hand.mode = ""
	}
	/** @param {KeyboardEvent} event */
	const press = event => {
		const arrow = ARROWS[event.key]
		if (!mask || !source || (!arrow && event.key !== "Enter") || event.ctrlKey || event.metaKey) return
		event.preventDefault()
		const from = hand.cursor ?? {x: source.width / 2, y: source.height / 2}
		const [dx, dy] = arrow ?? [0, 0]
		const step = Math.max(1, state.size / 4)
		hand.cursor = {
			x: Math.min(source.width, Math.max(0, from.x + dx * step)),
			y: Math.min(source.height, Math.max(0, from.y + dy * step))
		}
		if (!arrow || event.shiftKey) {
			mask.line(from, hand.cursor, state.size, state.tool === "eraser")
			mask.commit()
		}
		show({x: left + hand.cursor.x * zoom, y: top + hand.cursor.y * zoom})
	}

	const all = {x: 0, y: 0, width: box.width, height: box.height}
	const here = {x: left, y: top, width: (source?.width ?? 0) * zoom, height: (source?.height ?? 0) * zoom}
	return html`<div
		ref=${frame}
		class="edit-frame"
		data-tool=${state.tool}
		tabindex="0"
		role="application"
		aria-label=${t.canvas}
		aria-describedby="edit-hint"
		onPointerDown=${down}
		onPointerMove=${move}
		onPointerUp=${up}
		onPointerCancel=${up}
		onPointerEnter=${() => {
			hand.over = true
		}}
		onPointerLeave=${() => {
			hand.over = false
			show(null)
		}}
		onContextMenu=${event => event.preventDefault()}
		onKeyDown=${press}
		onBlur=${() => show(null)}
	>
		<canvas ref=${image} class="edit-layer"></canvas>
		<canvas ref=${overlay} class="edit-layer edit-mask" style=${{filter: "url(#edit-feather)"}}></canvas>
		<div ref=${ring} class="edit-ring" style=${{"--size": `${state.size * zoom}px`}} hidden></div>
		<svg class="edit-filter" aria-hidden="true">
			<filter id="edit-feather" filterUnits="userSpaceOnUse" primitiveUnits="userSpaceOnUse" color-interpolation-filters="sRGB" ...${all}>
				<feComponentTransfer in="SourceAlpha" result="kept" ...${here}>
					<feFuncA type="discrete" tableValues="1 0" />
				</feComponentTransfer>
				<feGaussianBlur stdDeviation=${(feather / 2) * zoom} ...${all} />
				<feComponentTransfer result="faded"><feFuncA type="linear" slope="2" /></feComponentTransfer>
				<feFlood class="edit-tint" ...${here} />
				<feComposite operator="out" in2="faded" />
				<feComposite operator="out" in2="kept" />
			</filter>
		</svg>
	</div>`
}
