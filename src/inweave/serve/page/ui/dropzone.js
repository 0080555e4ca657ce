// Dropping, pasting and choosing files; a folder gives all the files in it, recursively.
import {cx, html, useEffect, useRef, useState} from "../lib/dom.js"
import {Icon} from "./icons.js"

/** @param {DropZoneProps} props accept: as of an input of type file */
export function DropZone({onFiles, accept, label, hint, multiple, icon = "upload", compact}) {
	const [over, setOver] = useState(false)
	return html`<label
		class=${cx("dropzone", over && "dropzone-over", compact && "dropzone-compact")}
		onDragOver=${event => {
			event.preventDefault()
			setOver(true)
		}}
		onDragLeave=${() => setOver(false)}
		onDrop=${event => {
			event.preventDefault()
			event.stopPropagation()
			setOver(false)
			deliver(event.dataTransfer, files => onFiles(multiple ? files : files.slice(0, 1)))
		}}
	>
		<${Icon} name=${icon} />
		<span class="dropzone-label">${label}</span>
		${hint && html`<span class="dropzone-hint">${hint}</span>`}
		<input
			class="visually-hidden"
			type="file"
			accept=${accept}
			multiple=${multiple}
			onChange=${({currentTarget: input}) => {
				const files = [...input.files]
				input.value = ""
				if (files.length) onFiles(files)
			}}
		/>
	</label>`
}

/** Take files dropped anywhere or pasted. Returns an overlay for drags. @param {(files: File[]) => void} onFiles @param {string} text */
export function usePageDrop(onFiles, text) {
	const [over, setOver] = useState(false)
	const newest = useRef(onFiles)
	newest.current = onFiles
	useEffect(() => {
		let depth = 0
		/** @type {(step: number) => (event: DragEvent) => void} */
		const hover = step => event => {
			if (event.type === "dragover") event.preventDefault()
			depth += step
			setOver(depth > 0)
		}
		/** @param {DragEvent} event */
		const drop = event => {
			depth = 0
			setOver(false)
			if (event.defaultPrevented) return
			event.preventDefault()
			deliver(event.dataTransfer, newest.current)
		}
		/** @param {ClipboardEvent} event */
		const paste = event => deliver(event.clipboardData, newest.current)
		const stop = new AbortController()
		const handlers = {dragenter: hover(1), dragleave: hover(-1), dragover: hover(0), drop, paste}
		for (const [name, handle] of Object.entries(handlers)) {
			/** @param {any} event */
			const take = event => (event.dataTransfer ?? event.clipboardData)?.types.includes("Files") && handle(event)
			addEventListener(name, take, {signal: stop.signal})
		}
		return () => stop.abort()
	}, [])
	return over && html`<div class="drop-veil">${text}</div>`
}

/** @type {WeakMap<File, string>} */
const folders = new WeakMap()

/** The folder that a file was dropped with, "" for a single file. @param {File} file */
export const folderOf = file => folders.get(file) ?? ""

/** @param {DataTransfer | null} transfer @param {(files: File[]) => void} onFiles */
async function deliver(transfer, onFiles) {
	// all items are read at once: they are gone after the event
	const items = [...(transfer?.items ?? [])].filter(item => item.kind === "file")
	const parts = items.map(item => item.webkitGetAsEntry?.() ?? item.getAsFile())
	const files = (await Promise.all(parts.map(walk))).flat()
	if (files.length) onFiles(files)
}

/** The files of an entry, without hidden ones. @param {any} entry a File or a FileSystemEntry @returns {Promise<File[]>} */
async function walk(entry) {
	if (entry instanceof File) return [entry]
	if (!entry || entry.name.startsWith(".")) return []
	/** @type {(object: any, method: string) => Promise<any>} */
	const read = (object, method) => new Promise((resolve, reject) => object[method](resolve, reject))
	if (!entry.isDirectory) {
		const file = await read(entry, "file")
		folders.set(file, entry.fullPath.replace(/\/[^/]*$/, ""))
		return [file]
	}
	const reader = entry.createReader()
	const all = []
	// it returns a hundred at a time
	for (let some = await read(reader, "readEntries"); some.length; some = await read(reader, "readEntries"))
		all.push(...(await Promise.all(some.map(walk))))
	return all.flat()
}
