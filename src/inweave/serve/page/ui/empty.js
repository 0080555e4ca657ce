import {html} from "../lib/dom.js"
import {Swatch} from "./swatch.js"

/**
 * What a place shows while it has nothing to show: a piece of cloth, what belongs here, and a first thing to do.
 * @param {{ name: string, title: string, text?: any, children?: any }} props  name: chooses the cloth
 */
export const Empty = ({name, title, text, children}) => html`<div class="empty">
	<div class="empty-cloth"><${Swatch} name=${name} /></div>
	<h2>${title}</h2>
	${text && html`<p>${text}</p>`} ${children && html`<div class="row wrap empty-actions">${children}</div>`}
</div>`
