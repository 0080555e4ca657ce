// Import images: sent one after the other, stored unchanged by the worker, which reads them in a separate process.
import {
	app,
	Button,
	bytes,
	call,
	createStore,
	Dialog,
	DropZone,
	folderOf,
	html,
	Icon,
	showError,
	Thread,
	texts,
	toast,
	useStore
} from "../../kit.js"
import {load} from "./state.js"
import {t} from "./strings.js"

const ACCEPT = "image/png,image/jpeg,image/webp"
const IMAGE = /\.(png|jpe?g|webp)$/i
const NONE = {total: 0, done: 0, added: 0, known: 0, ignored: 0, refused: /** @type {string[]} */ ([])}
const imports = createStore({...NONE, running: false, waiting: /** @type {File[]} */ ([])})

/** @param {File[]} files those that are not images are left out */
export function addImages(files) {
	const images = files.filter(file => IMAGE.test(file.name) || ACCEPT.split(",").includes(file.type))
	if (!images.length) return toast(t.imports.none, {kind: "error"})
	const {running} = imports.get()
	imports.set(state => {
		const before = running ? state : NONE
		const ignored = before.ignored + files.length - images.length
		return {...before, ignored, total: before.total + images.length, waiting: [...state.waiting, ...images]}
	})
	if (!running) send().catch(showError)
}

/** @param {File} file the folder it came with, and its name */
const nameOf = file => (file.webkitRelativePath || `${folderOf(file)}/${file.name}`).replace(/^\/+/, "")

async function send() {
	imports.set({running: true})
	const limit = app.get().capabilities?.limits.body_bytes ?? Number.POSITIVE_INFINITY
	while (imports.get().waiting.length) {
		const [file, ...waiting] = imports.get().waiting
		imports.set({waiting})
		try {
			if (file.size > limit) throw new Error(t.imports.tooLarge(bytes(limit)))
			const {status} = await call("/v1/gallery", {
				method: "POST",
				body: file,
				headers: {"Content-Type": "application/octet-stream"},
				query: {name: nameOf(file).slice(-500), modified: file.lastModified / 1000}
			})
			imports.set(state => (status === 200 ? {known: state.known + 1} : {added: state.added + 1}))
		} catch (error) {
			imports.set(state => ({refused: [...state.refused, `${file.name}: ${error.message}`]}))
			if (error.status === 0 || error.status === 401 || error.status === 507) imports.set({waiting: []})
		}
		imports.set(state => ({done: state.done + 1}))
	}
	imports.set({running: false})
	await load()
}

/** @param {{ onClose: () => void }} props */
export function Import({onClose}) {
	const {total, done, added, known, ignored, refused, running} = useStore(imports)
	return html`<${Dialog} title=${t.imports.title} onClose=${onClose}>
		<p class="muted">${t.imports.text}</p>
		<${DropZone} onFiles=${addImages} accept=${ACCEPT} label=${t.imports.drop} multiple />
		<label class="button button-plain gallery-folder">
			<${Icon} name="upload" /><span>${t.imports.folder}</span>
			<input class="visually-hidden" type="file" webkitdirectory multiple onChange=${({currentTarget: input}) => {
				const files = [...input.files]
				input.value = ""
				if (files.length) addImages(files)
			}} />
		</label>
		<div role="status" class="stack stack-2">
			${running && html`<${Thread} percent=${(100 * done) / total} label=${t.imports.progress(done, total)} /><p class="num">${t.imports.progress(done, total)}</p>`}
			${!running && total > 0 && html`<p>${t.imports.done(added, known)}</p>`}
			${ignored > 0 && html`<p class="muted small">${t.imports.ignored(ignored)}</p>`}
			${
				refused.length > 0 &&
				html`<details class="fold">
					<summary class="field-error">${t.imports.refused(refused.length)}</summary>
					<ul class="small">${refused.slice(0, 100).map(line => html`<li>${line}</li>`)}</ul>
				</details>`
			}
		</div>
		${running && html`<div><${Button} size="small" onClick=${() => imports.set(state => ({waiting: [], total: state.done + 1}))}>${t.imports.stop}<//></div>`}
		${!running && total > 0 && html`<div class="dialog-actions"><${Button} kind="primary" onClick=${onClose}>${texts.actions.close}<//></div>`}
	<//>`
}
