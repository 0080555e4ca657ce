import {html, useId} from "../lib/dom.js"

/** A range input with a number input that accepts values outside the range. @param {SliderProps} props */
export function Slider({label, value, onChange, min = 0, max = 1, step = 0.05, hideLabel}) {
	const id = useId()
	const clamped = Math.min(max, Math.max(min, value))
	/** @param {number} n */
	const share = n => `${(100 * (n - min)) / (max - min)}%`
	const zero = Math.min(max, Math.max(min, 0))
	const fill = {"--from": share(Math.min(zero, clamped)), "--to": share(Math.max(zero, clamped))}
	/** @param {{ currentTarget: HTMLInputElement }} event */
	const read = event => Number(event.currentTarget.value)
	return html`<div class="slider">
		<label for=${id} class=${hideLabel ? "visually-hidden" : ""}>${label}</label>
		<input
			id=${id}
			type="range"
			min=${min}
			max=${max}
			step=${step}
			value=${clamped}
			style=${fill}
			onInput=${e => onChange(read(e))}
		/>
		<input
			class="slider-number num"
			type="number"
			inputmode="decimal"
			aria-label=${label}
			step=${step}
			value=${Math.round(value * 1000) / 1000}
			onChange=${e => e.currentTarget.value !== "" && Number.isFinite(read(e)) && onChange(read(e))}
		/>
	</div>`
}
