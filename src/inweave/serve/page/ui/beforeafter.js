import {html, useId, useState} from "../lib/dom.js"
import {texts} from "../strings.js"

/**
 * Two images of one size with a handle between them: a range input, so arrows, touch and screen readers work.
 * @param {BeforeAfterProps} props
 */
export function BeforeAfter({before, after, beforeLabel, afterLabel, width, height, alt}) {
	const [position, setPosition] = useState(50)
	const id = useId()
	return html`<div class="beforeafter" style=${{"--position": `${position}%`, "--ratio": `${width} / ${height}`}}>
		<img src=${after} width=${width} height=${height} alt=${`${alt}: ${afterLabel}`} />
		<img class="beforeafter-top" src=${before} width=${width} height=${height} alt=${`${alt}: ${beforeLabel}`} />
		<span class="beforeafter-tag beforeafter-tag-before" aria-hidden="true">${beforeLabel}</span>
		<span class="beforeafter-tag beforeafter-tag-after" aria-hidden="true">${afterLabel}</span>
		<label class="visually-hidden" for=${id}>${texts.compare.handle}</label>
		<input id=${id} type="range" min="0" max="100" step="1" value=${position} onInput=${e => setPosition(Number(e.currentTarget.value))} />
		<span class="beforeafter-handle" aria-hidden="true"></span>
	</div>`
}
