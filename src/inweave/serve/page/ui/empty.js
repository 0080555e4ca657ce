import {html} from "../lib/dom.js"
import {Swatch} from "./swatch.js"

/** A placeholder with a piece of cloth, which `name` chooses, and actions. @param {EmptyProps} props */
export const Empty = ({name, title, text, children}) => html`<div class="empty">
	<div class="empty-cloth"><${Swatch} name=${name} /></div>
	<h2>${title}</h2>
	${text && html`<p>${text}</p>`} ${children && html`<div class="row wrap empty-actions">${children}</div>`}
</div>`
