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
 * A list that is put in order by dragging, or with the arrow keys on the grip of an item.
 * @param {string[]} keys of the items @param {(from: number, to: number) => void} move
 * @returns {(index: number, label: string) => { item: Record<string, any>, grip: any }} attributes of an item, and its grip
 */
export function useReorder(keys, move) {
	const [dragged, setDragged] = useState("")
	const [over, setOver] = useState(-1)
	const end = () => {
		setDragged("")
		setOver(-1)
	}
	const go = (from, to) => from >= 0 && to >= 0 && to < keys.length && from !== to && move(from, to)
	return (index, label) => ({
		item: {
			"data-drag": !dragged ? undefined : dragged === keys[index] ? "from" : over === index ? "to" : undefined,
			onDragOver: event => {
				if (!dragged) return
				event.preventDefault()
				setOver(index)
			},
			onDrop: event => {
				if (!dragged) return
				event.preventDefault()
				end()
				go(keys.indexOf(dragged), index)
			}
		},
		grip: html`<button
			type="button"
			class="grip"
			draggable="true"
			aria-label=${label}
			title=${label}
			onDragStart=${event => {
				event.dataTransfer?.setData("text/plain", label)
				setDragged(keys[index])
			}}
			onDragEnd=${end}
			onKeyDown=${event => {
				const step = {ArrowUp: -1, ArrowDown: 1}[event.key]
				if (!step) return
				event.preventDefault()
				go(index, index + step)
			}}
		><${Icon} name="grip" /></button>`
	})
}
