// A small drawing pad, for a first dataset without images. Stamps make it work without a pointer.
import {
	Button,
	Dialog,
	html,
	Slider,
	submits,
	Text,
	texts,
	toPng,
	useBusy,
	useEffect,
	useRef,
	useState
} from "../../kit.js"
import {t} from "./strings.js"

const SIDE = 256
const COLORS = ["#1f2430", "#c8472f", "#e0a526", "#4a8f5c", "#3d5ba9", "#8a5a9e"]
/** @param {number} low @param {number} high */
const random = (low, high) => low + Math.random() * (high - low)

/** @type {Record<string, StampShape>} */
const STAMPS = {
	circle: {corners: 48},
	square: {corners: 4, turn: Math.PI / 4},
	triangle: {corners: 3},
	star: {corners: 10, inner: 0.42},
	flower: {corners: 16, inner: 0.7}
}

/** @param {PadProps} props */
export function Pad({onAdd, onClose, added}) {
	const canvas = useRef(/** @type {HTMLCanvasElement | null} */ (null))
	const strokes = useRef(/** @type {Stroke[]} */ ([]))
	const [count, setCount] = useState(0)
	const [color, setColor] = useState(COLORS[0])
	const [size, setSize] = useState(14)
	const [busy, during] = useBusy()
	const words = t.pad
	const idea = words.ideas[added % words.ideas.length]
	const [caption, setCaption] = useState(idea)
	const redraw = () => {
		const context = canvas.current?.getContext("2d")
		if (!context) return
		context.fillStyle = "white"
		context.fillRect(0, 0, SIDE, SIDE)
		for (const stroke of strokes.current) stroke(context)
		setCount(strokes.current.length)
	}
	useEffect(redraw, [])
	useEffect(() => setCaption(idea), [added])
	/** @param {Stroke} stroke */
	const push = stroke => {
		strokes.current.push(stroke)
		redraw()
	}
	/** @param {PointerEvent} event */
	const begin = event => {
		const target = /** @type {HTMLCanvasElement} */ (event.currentTarget)
		target.setPointerCapture(event.pointerId)
		/** @param {PointerEvent} e */
		const where = e => {
			const box = target.getBoundingClientRect()
			return [((e.clientX - box.left) * SIDE) / box.width, ((e.clientY - box.top) * SIDE) / box.height]
		}
		const points = [where(event)]
		push(context => {
			context.strokeStyle = color
			context.lineWidth = size
			context.lineCap = context.lineJoin = "round"
			context.beginPath()
			context.moveTo(points[0][0], points[0][1])
			for (const [x, y] of points) context.lineTo(x, y + 0.01)
			context.stroke()
		})
		/** @param {PointerEvent} e */
		const move = e => {
			points.push(where(e))
			redraw()
		}
		const end = () => {
			target.removeEventListener("pointermove", move)
		}
		target.addEventListener("pointermove", move)
		target.addEventListener("pointerup", end, {once: true})
		target.addEventListener("pointercancel", end, {once: true})
	}
	/** @param {string} name */
	const stamp = name => {
		const {corners, inner = 1, turn = 0} = STAMPS[name]
		const radius = random(45, 85)
		const [x, y, start] = [
			random(radius, SIDE - radius),
			random(radius, SIDE - radius),
			turn + random(-0.2, 0.2) - Math.PI / 2
		]
		push(context => {
			context.fillStyle = color
			context.beginPath()
			for (let n = 0; n < corners; n += 1) {
				const [far, angle] = [n % 2 ? radius * inner : radius, start + (2 * Math.PI * n) / corners]
				context.lineTo(x + far * Math.cos(angle), y + far * Math.sin(angle))
			}
			context.fill()
		})
		if (strokes.current.length === 1 && caption === idea) setCaption(words.of(words.stamps[name]))
	}
	/** @param {number} keep */
	const clear = keep => {
		strokes.current = strokes.current.slice(0, keep)
		redraw()
	}
	const add = () => {
		const drawing = toPng(/** @type {HTMLCanvasElement} */ (canvas.current))
		during(drawing.then(blob => onAdd(blob, caption)).then(() => clear(0)))
	}
	return html`<${Dialog} title=${words.title} onClose=${onClose} wide>
		<form class="train-pad" onSubmit=${submits(add)}>
			<canvas ref=${canvas} width=${SIDE} height=${SIDE} role="img" aria-label=${words.canvas(count)} onPointerDown=${begin}></canvas>
			<div class="stack grow">
				<p>${words.text}</p>
				<div class="row wrap" role="radiogroup" aria-label=${words.color}>
					${COLORS.map((each, index) => html`<label key=${each} class="train-color" style=${{"--color": each}}><input type="radio" name="pad-color" checked=${each === color} aria-label=${words.colors[index]} onChange=${() => setColor(each)} /></label>`)}
				</div>
				<${Slider} label=${words.size} min=${2} max=${40} step=${1} value=${size} onChange=${setSize} />
				<div class="row wrap" role="group" aria-label=${words.stamp}>
					${Object.keys(STAMPS).map(name => html`<button key=${name} type="button" class="chip" onClick=${() => stamp(name)}>${words.stamps[name]}</button>`)}
				</div>
				<div class="row wrap">
					<${Button} size="small" icon="undo" disabled=${!count} onClick=${() => clear(-1)}>${texts.actions.undo}<//>
					<${Button} size="small" icon="trash" disabled=${!count} onClick=${() => clear(0)}>${words.clear}<//>
				</div>
				<${Text} label=${words.caption} value=${caption} onChange=${setCaption} required maxlength="300" />
				<div class="row wrap">
					<${Button} kind="primary" type="submit" icon="plus" busy=${busy} disabled=${!count}>${words.add(added + 1)}<//>
					<${Button} onClick=${onClose}>${words.done}<//>
				</div>
				<p class="small muted" role="status">${words.added(added)}</p>
			</div>
		</form>
	<//>`
}
