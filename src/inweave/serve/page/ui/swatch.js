// A woven swatch: a placeholder for things without an image. The same name always gives the same cloth.
import {html, useMemo} from "../lib/dom.js"

const DYES = ["indigo", "madder", "weld", "woad", "linen"]

/** @param {string} text a small hash, good enough to tell cloths apart */
function hash(text) {
	let value = 2166136261
	for (let index = 0; index < text.length; index += 1) value = Math.imul(value ^ text.charCodeAt(index), 16777619)
	value = Math.imul(value ^ (value >>> 15), 2246822507)
	return (value ^ (value >>> 13)) >>> 0
}

/** One path per dye, of the threads that pass over. @param {string} name @param {number} size threads per side */
function weave(name, size) {
	const seed = hash(name)
	/** @param {number} shift */
	const pick = shift => DYES[(seed >>> shift) % 4]
	const warp = [pick(0), DYES[4], pick(3), pick(0)]
	const cross = [pick(6) === pick(0) ? DYES[4] : pick(6), pick(9), DYES[4]]
	const period = 2 + ((seed >>> 12) % 3) // plain, twill, long twill
	const step = 1 + ((seed >>> 15) % 2)
	/** @type {Labels} */
	const paths = {}
	for (let y = 0; y < size; y += 1) {
		for (let x = 0; x < size; x += 1) {
			const over = (x + y * step) % period < period / 2
			const dye = over ? warp[(x >> 1) % warp.length] : cross[(y >> 1) % cross.length]
			paths[dye] = `${paths[dye] ?? ""}${over ? `M${x + 0.5} ${y - 0.04}v1.08` : `M${x - 0.04} ${y + 0.5}h1.08`}`
		}
	}
	return paths
}

/** @param {{ name: string, size?: number }} props */
export function Swatch({name, size = 8}) {
	const paths = useMemo(() => Object.entries(weave(name, size)), [name, size])
	return html`<svg class="swatch" viewBox=${`0 0 ${size} ${size}`} preserveAspectRatio="xMidYMid slice" aria-hidden="true" focusable="false">
		${paths.map(([dye, path]) => html`<path d=${path} style=${{stroke: `var(--thread-${dye})`}} />`)}
	</svg>`
}

/** A cloth that grows with the work, row by row. @param {{ name: string, percent: number }} props */
export const Loom = ({name, percent}) => html`<div class="loom" style=${{"--woven": `${percent}%`}}>
	<${Swatch} name=${name} size=${24} />
</div>`

/** Progress, as a thread; null: unknown. @param {{ percent: number | null, label: string }} props */
export const Thread = ({percent, label}) => html`<div
	class=${percent === null ? "thread thread-unknown" : "thread"}
	role="progressbar"
	aria-label=${label}
	aria-valuemin="0"
	aria-valuemax="100"
	aria-valuenow=${percent === null ? undefined : Math.round(percent)}
>
	<div class="thread-fill" style=${{inlineSize: `${percent ?? 30}%`}}></div>
</div>`

/** The image beside a LoRA's file, or the sample made here; null: neither. @param {Lora | undefined} lora */
const imageOf = lora =>
	lora?.preview
		? `/v1/loras/${lora.id}/preview`
		: lora?.sample
			? `/v1/loras/${lora.id}/sample?v=${lora.sample.version}`
			: null

/** The image of a LoRA, or its cloth. @param {{ lora: Lora | undefined, name: string }} props */
export const LoraImage = ({lora, name}) =>
	imageOf(lora)
		? html`<img src=${imageOf(lora)} alt="" loading="lazy" />`
		: html`<${Swatch} name=${lora?.hashes?.autov3 ?? name} />`
