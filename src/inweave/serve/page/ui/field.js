// Labeled controls.
import {html, useId} from "../lib/dom.js"
import {Icon} from "./icons.js"

/** A labeled control; `children` is a function of its id. @param {FieldProps} props */
export function Field({label, hint, children}) {
	const id = useId()
	return html`<div class="field">
		<label for=${id}>${label}</label>
		${children(id)} ${hint && html`<p class="field-hint">${hint}</p>`}
	</div>`
}

/** Choices as [value, label]. @param {SelectProps["options"]} options */
const pairs = options =>
	Array.isArray(options)
		? options.map(each => (typeof each === "string" ? [each, each] : each))
		: Object.entries(options)

/** @param {SearchProps} props */
export const Search = ({onChange, ...rest}) => html`<div class="search">
	<${Icon} name="search" />
	<input class="input" type="search" onInput=${e => onChange(e.currentTarget.value)} ...${rest} />
</div>`

/** @param {SelectProps} props */
export const Select = ({label, value, options, onChange, hint}) => html`<${Field} label=${label} hint=${hint}>
	${id => html`<select id=${id} class="input" value=${value} onChange=${e => onChange(e.currentTarget.value)}>
		${pairs(options).map(([each, name]) => html`<option value=${each} selected=${each === value}>${name}</option>`)}
	</select>`}
<//>`

/** A number that may be left empty: `onChange` gets undefined then. @param {NumberFieldProps} props */
export const NumberField = ({label, value, onChange, hint, ...rest}) => html`<${Field} label=${label} hint=${hint}>
	${id => html`<input
		id=${id}
		class="input num"
		type="number"
		inputmode="decimal"
		value=${value ?? ""}
		onInput=${e => {
			const text = e.currentTarget.value
			if (Number.isFinite(Number(text))) onChange(text === "" ? undefined : Number(text))
		}}
		...${rest}
	/>`}
<//>`

/** @param {CheckProps} props */
export const Check = ({label, checked, onChange}) => html`<label class="check">
	<input type="checkbox" checked=${checked} onChange=${e => onChange(e.currentTarget.checked)} />
	<span>${label}</span>
</label>`

/** Radio buttons that look like a switch. @param {SegmentedProps} props */
export function Segmented({label, value, options, onChange}) {
	const name = useId()
	return html`<fieldset class="segmented">
		<legend class="visually-hidden">${label}</legend>
		${pairs(options).map(
			([each, text]) => html`<label key=${each}>
				<input type="radio" name=${name} value=${each} checked=${each === value} onChange=${() => onChange(each)} />
				<span>${text}</span>
			</label>`
		)}
	</fieldset>`
}
