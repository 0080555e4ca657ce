// The logged loss, with its running average.
import {html, useState} from "../../kit.js"
import {t} from "./strings.js"

const WIDTH = 600
const HEIGHT = 200
const MAX_POINTS = 400

/** @param {number} value */
export const figure = value => (value >= 100 || value === 0 ? value.toFixed(0) : value.toPrecision(3))

/** Round values from 0 to about `most`, for an axis. @param {number} most @param {number} count */
function ticks(most, count) {
	const power = 10 ** Math.floor(Math.log10(most / count))
	const step = [1, 2, 5, 10].map(each => each * power).find(each => most / each <= count) ?? 10 * power
	return Array.from({length: Math.floor(most / step + 1e-9) + 1}, (_, index) => Number((index * step).toPrecision(6)))
}

/** @param {{ points: LossPoint[], validations: Validation[], total: number }} props */
export function LossChart({points, validations, total}) {
	const [place, setPlace] = useState(/** @type {number | null} */ (null))
	const words = t.chart
	const finite = points.filter(each => each.loss !== null && each.loss_average !== null)
	if (!finite.length) return html`<div class="train-chart train-chart-empty muted small">${words.empty}</div>`
	const every = Math.ceil(finite.length / MAX_POINTS)
	const shown = finite.filter((_, index) => index % every === 0 || index === finite.length - 1)
	// the axis grows with the run: the first steps would be a dot in its corner
	const last = Math.max(shown[shown.length - 1].step, Math.min(total, 20), 2)
	const losses = shown.map(each => each.loss ?? 0).sort((a, b) => a - b)
	// one outlier must not flatten the curve
	const top = Math.max(
		losses[Math.floor(0.97 * (losses.length - 1))] * 1.15,
		...shown.map(each => each.loss_average ?? 0),
		...validations.map(each => each.loss),
		1e-9
	)
	/** @param {number} step */
	const across = step => (WIDTH * (step - 1)) / (last - 1)
	/** @param {number | null} loss */
	const down = loss => HEIGHT * (1 - Math.min(1, (loss ?? 0) / top))
	/** @param {"loss" | "loss_average"} name */
	const line = name => shown.map(each => `${across(each.step).toFixed(1)},${down(each[name]).toFixed(1)}`).join(" ")
	const first = finite[0]
	const newest = finite[finite.length - 1]
	const at = place === null ? newest : shown[Math.min(place, shown.length - 1)]
	/** @param {PointerEvent} event */
	const look = event => {
		const box = /** @type {Element} */ (event.currentTarget).getBoundingClientRect()
		const step = 1 + ((event.clientX - box.left) / box.width) * (last - 1)
		let best = 0
		shown.forEach((each, index) => {
			if (Math.abs(each.step - step) < Math.abs(shown[best].step - step)) best = index
		})
		setPlace(best)
	}
	const high = ticks(top, 4).map(value => ({value, at: `${(100 * value) / top}%`}))
	const long = ticks(last, 5).map(value => Math.max(1, value))
	return html`<figure class="train-chart small num">
		<span class="train-axis" aria-hidden="true">${words.lossAxis}</span>
		<div class="train-scale-y" aria-hidden="true">${high.map(({value, at}) => html`<span style=${{insetBlockEnd: at}}>${value}</span>`)}</div>
		<div class="train-plot" onPointerMove=${look} onPointerLeave=${() => setPlace(null)}>
			<svg viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} preserveAspectRatio="none" role="img" aria-label=${words.summary(
				first.step,
				figure(first.loss_average ?? 0),
				newest.step,
				figure(newest.loss_average ?? 0),
				figure(Math.min(...finite.map(each => each.loss_average ?? 0)))
			)}>
				${high.map(({value}) => html`<line class="train-grid" x1="0" x2=${WIDTH} y1=${down(value)} y2=${down(value)} />`)}
				<polyline class="train-loss" points=${line("loss")} />
				<polyline class="train-average" points=${line("loss_average")} />
				<polyline class="train-validation" points=${validations.map(each => `${across(each.step)},${down(each.loss)}`).join(" ")} />
				${place !== null && html`<line class="train-cursor" x1=${across(at.step)} x2=${across(at.step)} y1="0" y2=${HEIGHT} />`}
			</svg>
		</div>
		<div class="train-scale-x" aria-hidden="true">${long.map(value => html`<span style=${{insetInlineStart: `${(100 * (value - 1)) / (last - 1)}%`}}>${value}</span>`)}</div>
		<span class="train-axis train-axis-x" aria-hidden="true">${words.stepAxis}</span>
		<figcaption class="row wrap train-legend">
			<span>${words.step(at.step)}</span>
			<span class="train-key train-key-loss">${words.loss(figure(at.loss ?? 0))}</span>
			<span class="train-key train-key-average">${words.average(figure(at.loss_average ?? 0))}</span>
			${validations.length > 0 && html`<span class="train-key train-key-validation">${words.validation(figure(validations[validations.length - 1].loss))}</span>`}
		</figcaption>
	</figure>`
}
