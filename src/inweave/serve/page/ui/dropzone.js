// Places where files are dropped, pasted or chosen.
import { cx, html, useEffect, useRef, useState } from "../lib/dom.js";
import { Icon } from "./icons.js";

/**
 * @param {{ onFiles: (files: File[]) => void, accept: string, label: string, hint?: string, multiple?: boolean, icon?: any, compact?: boolean }} props
 *   accept: as of an input of type file
 */
export function DropZone({ onFiles, accept, label, hint, multiple, icon = "upload", compact }) {
	const [over, setOver] = useState(false);
	return html`<label
		class=${cx("dropzone", over && "dropzone-over", compact && "dropzone-compact")}
		onDragOver=${(/** @type {DragEvent} */ e) => {
			e.preventDefault();
			setOver(true);
		}}
		onDragLeave=${() => setOver(false)}
		onDrop=${(/** @type {DragEvent} */ e) => {
			e.preventDefault();
			e.stopPropagation();
			setOver(false);
			deliver(e.dataTransfer, onFiles, multiple);
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
			onChange=${(/** @type {any} */ e) => {
				const files = [...e.currentTarget.files];
				e.currentTarget.value = "";
				if (files.length) onFiles(files);
			}}
		/>
	</label>`;
}

/**
 * Take files that are dropped anywhere on the page or pasted, while the component is shown. Returns whether files hover.
 * @param {(files: File[]) => void} onFiles
 */
export function usePageDrop(onFiles) {
	const [over, setOver] = useState(false);
	const newest = useRef(onFiles);
	newest.current = onFiles;
	useEffect(() => {
		let depth = 0;
		/** @param {DragEvent} event */
		const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
		const enter = (/** @type {DragEvent} */ event) => {
			if (hasFiles(event)) setOver(++depth > 0);
		};
		const leave = (/** @type {DragEvent} */ event) => {
			if (hasFiles(event)) setOver(--depth > 0);
		};
		const hover = (/** @type {DragEvent} */ event) => {
			if (hasFiles(event)) event.preventDefault();
		};
		const drop = (/** @type {DragEvent} */ event) => {
			depth = 0;
			setOver(false);
			if (event.defaultPrevented || !hasFiles(event)) return;
			event.preventDefault();
			deliver(event.dataTransfer, newest.current, true);
		};
		const paste = (/** @type {ClipboardEvent} */ event) => {
			if (event.clipboardData?.files.length) deliver(event.clipboardData, newest.current, true);
		};
		addEventListener("dragenter", enter);
		addEventListener("dragleave", leave);
		addEventListener("dragover", hover);
		addEventListener("drop", drop);
		addEventListener("paste", paste);
		return () => {
			removeEventListener("dragenter", enter);
			removeEventListener("dragleave", leave);
			removeEventListener("dragover", hover);
			removeEventListener("drop", drop);
			removeEventListener("paste", paste);
		};
	}, []);
	return over;
}

/**
 * @param {DataTransfer | null} transfer
 * @param {(files: File[]) => void} onFiles
 * @param {boolean} [multiple]
 */
function deliver(transfer, onFiles, multiple) {
	const files = [...(transfer?.files ?? [])];
	if (files.length) onFiles(multiple ? files : files.slice(0, 1));
}

/**
 * The bytes of a file in base64, as requests carry pictures.
 * @param {Blob} file
 * @returns {Promise<string>}
 */
export const toBase64 = (file) =>
	new Promise((resolve, reject) => {
		const reader = new FileReader();
		reader.onload = () => resolve(String(reader.result).replace(/^data:[^,]*,/, ""));
		reader.onerror = () => reject(reader.error);
		reader.readAsDataURL(file);
	});
