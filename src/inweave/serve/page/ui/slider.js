import { html, useId } from "../lib/dom.js";

/**
 * A range with a number beside it that accepts more than the range shows.
 * @param {{ label: string, value: number, onChange: (value: number) => void, min?: number, max?: number, step?: number,
 *   hideLabel?: boolean, marks?: number[], onCommit?: (value: number) => void }} props
 */
export function Slider({ label, value, onChange, min = 0, max = 1, step = 0.05, hideLabel, onCommit }) {
	const id = useId();
	const clamped = Math.min(max, Math.max(min, value));
	const share = (/** @type {number} */ n) => `${(100 * (n - min)) / (max - min)}%`;
	const zero = Math.min(max, Math.max(min, 0));
	const fill = { "--from": share(Math.min(zero, clamped)), "--to": share(Math.max(zero, clamped)) };
	/** @param {any} event */
	const read = (event) => Number(event.currentTarget.value);
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
			onInput=${(/** @type {any} */ e) => onChange(read(e))}
			onChange=${(/** @type {any} */ e) => onCommit?.(read(e))}
		/>
		<input
			class="slider-number num"
			type="number"
			inputmode="decimal"
			aria-label=${label}
			step=${step}
			value=${Math.round(value * 1000) / 1000}
			onChange=${(/** @type {any} */ e) => {
				if (e.currentTarget.value === "" || !Number.isFinite(read(e))) return;
				onChange(read(e));
				onCommit?.(read(e));
			}}
		/>
	</div>`;
}
