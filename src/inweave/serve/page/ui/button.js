import {cx, html} from "../lib/dom.js"
import {Icon} from "./icons.js"

/** A button, or a link with `href`. Without children, `label` is its name. @param {ButtonProps} props */
export function Button({children, icon, label, kind = "plain", size, href, class: extra, busy, disabled, ...rest}) {
	const bare = !children
	const names = cx("button", `button-${kind}`, size && `button-${size}`, bare && "button-icon", extra)
	const inside = html`${icon && html`<${Icon} name=${icon} />`}${children && html`<span>${children}</span>`}`
	const naming = bare ? {"aria-label": label, title: label} : {title: label}
	if (href !== undefined) return html`<a class=${names} href=${href} ...${naming} ...${rest}>${inside}</a>`
	return html`<button type="button" class=${names} disabled=${disabled || busy} aria-busy=${busy} ...${naming} ...${rest}>
		${inside}
	</button>`
}
