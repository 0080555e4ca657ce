// Shared by forms: text fields, a busy state, lists that can be reordered.
import {html, useRef, useState} from "../lib/dom.js"
import {Field} from "./field.js"
import {Icon} from "./icons.js"
import {showError} from "./toast.js"

/** @param {TextProps} props  rows: several lines */
export const Text = ({
	label,
	value,
	onChange,
	hint,
	rows,
	class: extra = "",
	...rest
}) => html`<${Field} label=${label} hint=${hint}>
	${id => html`<${rows ? "textarea" : "input"} id=${id} class=${`input ${extra}`} rows=${rows} value=${value} onInput=${e => onChange(e.currentTarget.value)} ...${rest} />`}
<//>`

/** A `submit` handler that replaces the browser's. @type {(run: () => void) => (event: Event) => void} */
export const submits = run => event => {
	event.preventDefault()
	run()
}

/** Whether a promise is pending, and a function that awaits one and shows its error. @returns {Busy} */
export function useBusy() {
	const [busy, setBusy] = useState(false)
	const failed = useRef(/** @type {void | (() => void)} */ (undefined))
	/** @type {Busy[1]} */
	const during = promise => {
		setBusy(true)
		failed.current?.() // the error of the last attempt
		const shown = promise.catch(error => {
			failed.current = showError(error)
		})
		return shown.finally(() => setBusy(false))
	}
	return [busy, during]
}

/**
 * A list reordered by dragging its grips or with the arrow keys. Returns a function for the attributes and the grip of an item.
 * @param {string[]} keys of the items @param {(from: number, to: number) => void} move
 */
export function useReorder(keys, move) {
	const [dragged, setDragged] = useState("")
	const [over, setOver] = useState(-1)
	const end = () => {
		setDragged("")
		setOver(-1)
	}
	/** @param {number} from @param {number} to */
	const go = (from, to) => to >= 0 && to < keys.length && from !== to && move(from, to)
	/** @param {PointerEvent} event */
	const under = event => {
		const item = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-index]")
		return Number(item?.getAttribute("data-index") ?? -1)
	}
	return (/** @type {number} */ index, /** @type {string} */ label) => ({
		item: {
			"data-index": index,
			"data-drag": !dragged ? undefined : dragged === keys[index] ? "from" : over === index ? "to" : undefined
		},
		grip: html`<button
			type="button"
			class="grip"
			aria-label=${label}
			title=${label}
			onPointerDown=${event => {
				event.currentTarget.setPointerCapture(event.pointerId)
				setDragged(keys[index])
			}}
			onPointerMove=${event => dragged && setOver(under(event))}
			onPointerUp=${event => {
				end()
				go(index, under(event))
			}}
			onPointerCancel=${end}
			onKeyDown=${event => {
				const step = Number(event.key === "ArrowDown") - Number(event.key === "ArrowUp")
				if (!step) return
				event.preventDefault()
				go(index, index + step)
			}}
		><${Icon} name="grip" /></button>`
	})
}
