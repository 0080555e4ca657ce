// What forms share: one line or several of text, a promise that is waited for, lists that are put in order.
import {html, useState} from "../lib/dom.js"
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

/** A handler of `submit` that does something else than the browser would. */
export const submits = run => event => {
	event.preventDefault()
	run()
}

/**
 * Whether something is waited for, and a function that waits for a promise; what goes wrong is shown.
 * @returns {[boolean, (promise: Promise<any>) => Promise<any>]}
 */
export function useBusy() {
	const [busy, setBusy] = useState(false)
	const during = promise => {
		setBusy(true)
		return promise.catch(showError).finally(() => setBusy(false))
	}
	return [busy, during]
}

/**
 * A list that is put in order by dragging the grips of its items, or with arrow keys on them. Gives a function that has the
 * attributes of an item, and its grip.
 * @param {string[]} keys of the items @param {(from: number, to: number) => void} move
 */
export function useReorder(keys, move) {
	const [dragged, setDragged] = useState("")
	const [over, setOver] = useState(-1)
	const end = () => {
		setDragged("")
		setOver(-1)
	}
	const go = (from, to) => to >= 0 && to < keys.length && from !== to && move(from, to)
	const under = event => {
		const item = document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-index]")
		return Number(item?.getAttribute("data-index") ?? -1)
	}
	return (index, label) => ({
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
				const step = {ArrowUp: -1, ArrowDown: 1}[event.key]
				if (!step) return
				event.preventDefault()
				go(index, index + step)
			}}
		><${Icon} name="grip" /></button>`
	})
}
