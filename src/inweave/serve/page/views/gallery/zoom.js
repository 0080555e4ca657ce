// Zoom and pan of an image that fits its frame at scale 1: wheel, drag, two fingers, double click; a swipe asks for another.
import {useEffect, useRef, useState} from "../../kit.js"

const MOST = 16
/** pixels of a swipe */
const FAR = 50
const WHOLE = {scale: 1, x: 0, y: 0}

/**
 * The state and the handlers of a frame. `x` and `y`: of the middle of the image, from that of the frame.
 * @param {string} key of the image: another one is seen whole @param {(by: number) => void} onSwipe
 */
export function useZoom(key, onSwipe) {
	const [view, setView] = useState(WHOLE)
	const frame = useRef(/** @type {HTMLElement | null} */ (null))
	const fingers = useRef(/** @type {Map<number, Point>} */ (new Map()))
	const start = useRef(/** @type {Point | null} */ (null))
	useEffect(() => setView(WHOLE), [key])

	/** @param {typeof WHOLE} next */
	const bounded = next => {
		const scale = Math.min(MOST, Math.max(1, next.scale))
		const {width = 0, height = 0} = frame.current?.getBoundingClientRect() ?? {}
		const [right, down] = [((scale - 1) * width) / 2, ((scale - 1) * height) / 2]
		return {scale, x: Math.max(-right, Math.min(right, next.x)), y: Math.max(-down, Math.min(down, next.y))}
	}
	/** @param {number} factor @param {Point} [at] of the window: it stays where it is */
	const zoomBy = (factor, at) => {
		const box = frame.current?.getBoundingClientRect()
		const fixed = at && box ? {x: at.x - box.x - box.width / 2, y: at.y - box.y - box.height / 2} : {x: 0, y: 0}
		setView(now => {
			const scale = Math.min(MOST, Math.max(1, now.scale * factor))
			const by = scale / now.scale
			return bounded({scale, x: fixed.x - (fixed.x - now.x) * by, y: fixed.y - (fixed.y - now.y) * by})
		})
	}
	/** @param {number} x @param {number} y */
	const panBy = (x, y) => setView(now => bounded({...now, x: now.x + x, y: now.y + y}))
	const fit = () => setView(WHOLE)

	const newest = useRef(zoomBy)
	newest.current = zoomBy
	useEffect(() => {
		const element = frame.current
		/** @param {WheelEvent} event */
		const wheel = event => {
			event.preventDefault() // the browser would zoom or scroll the page
			newest.current(Math.exp(-Math.max(-100, Math.min(100, event.deltaY)) / 250), {x: event.clientX, y: event.clientY})
		}
		element?.addEventListener("wheel", wheel, {passive: false})
		return () => element?.removeEventListener("wheel", wheel)
	}, [])

	/** @param {PointerEvent} event */
	const up = event => {
		const from = start.current
		const single = fingers.current.size === 1
		fingers.current.delete(event.pointerId)
		if (!from || !single) return
		start.current = null
		const [right, down] = [event.clientX - from.x, event.clientY - from.y]
		const swiped = event.pointerType === "touch" && Math.abs(right) > FAR && Math.abs(right) > 2 * Math.abs(down)
		if (view.scale === 1 && swiped && event.type === "pointerup") onSwipe(right > 0 ? -1 : 1)
	}
	const handlers = {
		ref: frame,
		onPointerDown: (/** @type {PointerEvent} */ event) => {
			if (event.button !== 0) return
			frame.current?.setPointerCapture(event.pointerId)
			const at = {x: event.clientX, y: event.clientY}
			fingers.current.set(event.pointerId, at)
			start.current = fingers.current.size === 1 ? at : null
		},
		onPointerMove: (/** @type {PointerEvent} */ event) => {
			const before = fingers.current.get(event.pointerId)
			if (!before) return
			const at = {x: event.clientX, y: event.clientY}
			const other = [...fingers.current].find(([id]) => id !== event.pointerId)?.[1]
			fingers.current.set(event.pointerId, at)
			if (!other) return panBy(at.x - before.x, at.y - before.y)
			/** @param {Point} point */
			const apart = point => Math.hypot(point.x - other.x, point.y - other.y)
			panBy((at.x - before.x) / 2, (at.y - before.y) / 2)
			zoomBy(apart(at) / Math.max(1, apart(before)), {x: (at.x + other.x) / 2, y: (at.y + other.y) / 2})
		},
		onPointerUp: up,
		onPointerCancel: up,
		onDblClick: (/** @type {MouseEvent} */ event) => {
			if (view.scale > 1) fit()
			else zoomBy(3, {x: event.clientX, y: event.clientY})
		}
	}
	return {view, handlers, zoomBy, panBy, fit}
}
