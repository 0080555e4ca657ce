// Icons: strokes on a 24-pixel grid, in the color of the text around them.
import {html} from "../lib/dom.js"

const PATHS = {
	generate: "M12 3v4M12 17v4M3 12h4M17 12h4M6.3 6.3l2.4 2.4M15.3 15.3l2.4 2.4M17.7 6.3l-2.4 2.4M8.7 15.3l-2.4 2.4",
	compare: "M12 3v18M4 6h5v12H4zM15 6h5v12h-5z",
	edit: "M4 20l1-4L16.5 4.5a2.1 2.1 0 0 1 3 3L8 19zM14 7l3 3",
	gallery: "M8 4h12v12H8zM8 8H4v12h12v-4M8 14l4-4l3 3l2-2l3 3M16 7.5v.01",
	library: "M4 5h6v6H4zM14 5h6v6h-6zM4 15h6v4H4zM14 15h6v4h-6z",
	train: "M4 19V5M4 19h16M7 15c3 0 3-7 6-7s3 4 6 4",
	queue: "M4 6h16M4 12h16M4 18h10",
	sun: "M12 8a4 4 0 1 0 0 8a4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19",
	moon: "M20 14.5A8 8 0 0 1 9.5 4A8 8 0 1 0 20 14.5z",
	auto: "M12 4a8 8 0 1 0 0 16zM12 4a8 8 0 0 1 0 16",
	help: "M9 9a3 3 0 1 1 4.2 2.7c-.8.4-1.2 1-1.2 1.8v.5M12 17.5v.01",
	close: "M6 6l12 12M18 6L6 18",
	plus: "M12 5v14M5 12h14",
	minus: "M5 12h14",
	check: "M5 12.5l4.5 4.5L19 7.5",
	lock: "M7 11V8a5 5 0 0 1 10 0v3M5.5 11h13v9h-13z",
	unlock: "M7 11V8a5 5 0 0 1 9.7-1.7M5.5 11h13v9h-13z",
	dice: "M5 5h14v14H5zM9 9v.01M15 15v.01M15 9v.01M9 15v.01",
	download: "M12 4v11M7 10.5l5 5l5-5M5 20h14",
	upload: "M12 16V5M7 9.5l5-5l5 5M5 20h14",
	trash: "M5 7h14M10 7V4.5h4V7M7 7l1 12.5h8L17 7M10.5 11v5M13.5 11v5",
	reuse: "M4 12a8 8 0 0 1 13.7-5.6L20 8.5M20 4v4.5h-4.5M20 12a8 8 0 0 1-13.7 5.6L4 15.5M4 20v-4.5h4.5",
	grip: "M9 6v.01M9 12v.01M9 18v.01M15 6v.01M15 12v.01M15 18v.01",
	pause: "M9 5v14M15 5v14",
	play: "M8 5l11 7l-11 7z",
	stop: "M6.5 6.5h11v11h-11z",
	search: "M11 5a6 6 0 1 0 0 12a6 6 0 0 0 0-12M15.5 15.5L20 20",
	sliders: "M4 8h9M17 8h3M15 5.5v5M4 16h3M11 16h9M9 13.5v5",
	warning: "M12 4L2.5 20h19zM12 10v4.5M12 17.3v.01",
	info: "M12 4a8 8 0 1 0 0 16a8 8 0 0 0 0-16M12 11v5M12 8v.01",
	image: "M4 5h16v14H4zM4 16l5-5l4 4l2.5-2.5L20 17M15 9v.01",
	expand: "M9 4H4v5M15 4h5v5M9 20H4v-5M15 20h5v-5",
	brush: "M20 4L10.5 13.5M9 13a3.5 3.5 0 0 1 2.5 2.5C11.5 19 8 20 4 19.5C5.5 18 5 13.5 9 13z",
	eraser: "M9 19l-5-5L14 4l6 6l-9 9zM9 9l6 6M9 19h11",
	hand: "M12 3v18M3 12h18M12 3L9.5 5.5M12 3l2.5 2.5M12 21l-2.5-2.5M12 21l2.5-2.5M3 12l2.5-2.5M3 12l2.5 2.5M21 12l-2.5-2.5M21 12l-2.5 2.5",
	undo: "M8 5L4 9l4 4M4 9h9a6 6 0 0 1 0 12h-3",
	redo: "M16 5l4 4l-4 4M20 9h-9a6 6 0 0 0 0 12h3",
	invert: "M4 4h16v16H4zM20 4L4 20M8 20l12-12M14 20l6-6",
	holes: "M4 4h5v5H4zM14 4h6v5h-6zM9 9h5v6H9zM4 15h5v5H4zM14 15h6v5h-6z",
	star: "M12 3.5l2.6 5.4l5.9.8l-4.3 4.1l1 5.9l-5.2-2.8l-5.2 2.8l1-5.9l-4.3-4.1l5.9-.8z",
	previous: "M15 5l-7 7l7 7",
	next: "M9 5l7 7l-7 7",
	eye: "M2.5 12C6 6 18 6 21.5 12C18 18 6 18 2.5 12zM12 9.5a2.5 2.5 0 1 0 0 5a2.5 2.5 0 0 0 0-5"
}

/** @param {{ name: keyof typeof PATHS }} props */
export const Icon = ({name}) =>
	html`<svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false"><path d=${PATHS[name]} /></svg>`
