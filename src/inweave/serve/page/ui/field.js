// Labeled controls.
import { html, useId } from "../lib/dom.js";

/**
 * A label over any one control; `children` is a function of the control's id.
 * @param {{ label: string, hint?: any, children: (id: string) => any }} props
 */
export function Field({ label, hint, children }) {
	const id = useId();
	return html`<div class="field">
		<label for=${id}>${label}</label>
		${children(id)} ${hint && html`<p class="field-hint">${hint}</p>`}
	</div>`;
}

/**
 * @param {{ label: string, value: string, options: (string | { value: string, label: string })[], onChange: (value: string) => void, hint?: any }} props
 */
export const Select = ({ label, value, options, onChange, hint }) => html`<${Field} label=${label} hint=${hint}>
	${(
		/** @type {string} */ id,
	) => html`<select id=${id} class="input" value=${value} onChange=${(/** @type {any} */ e) => onChange(e.currentTarget.value)}>
		${options.map((option) => {
			const each = typeof option === "string" ? { value: option, label: option } : option;
			return html`<option value=${each.value} selected=${each.value === value}>${each.label}</option>`;
		})}
	</select>`}
<//>`;

/**
 * A number that may be left empty; `onChange` gets undefined then, and `placeholder` says what applies.
 * @param {{ label: string, value: number | undefined, onChange: (value: number | undefined) => void, min?: number, max?: number,
 *   step?: number, placeholder?: string, hint?: any }} props
 */
export const NumberField = ({
	label,
	value,
	onChange,
	min,
	max,
	step = 1,
	placeholder,
	hint,
}) => html`<${Field} label=${label} hint=${hint}>
	${(/** @type {string} */ id) => html`<input
		id=${id}
		class="input num"
		type="number"
		inputmode="decimal"
		min=${min}
		max=${max}
		step=${step}
		placeholder=${placeholder}
		value=${value ?? ""}
		onInput=${(/** @type {any} */ e) => {
			const text = e.currentTarget.value;
			if (text === "") onChange(undefined);
			else if (Number.isFinite(Number(text))) onChange(Number(text));
		}}
	/>`}
<//>`;

/**
 * @param {{ label: string, checked: boolean, onChange: (checked: boolean) => void }} props
 */
export const Check = ({ label, checked, onChange }) => html`<label class="check">
	<input type="checkbox" checked=${checked} onChange=${(/** @type {any} */ e) => onChange(e.currentTarget.checked)} />
	<span>${label}</span>
</label>`;

/**
 * One of a few: a group of radio buttons that looks like a switch.
 * @param {{ label: string, value: string, options: { value: string, label: string }[], onChange: (value: string) => void }} props
 */
export function Segmented({ label, value, options, onChange }) {
	const name = useId();
	return html`<fieldset class="segmented">
		<legend class="visually-hidden">${label}</legend>
		${options.map(
			(each) => html`<label key=${each.value}>
				<input type="radio" name=${name} value=${each.value} checked=${each.value === value} onChange=${() => onChange(each.value)} />
				<span>${each.label}</span>
			</label>`,
		)}
	</fieldset>`;
}
