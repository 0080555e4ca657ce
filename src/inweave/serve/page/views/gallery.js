// Gallery: every image that stays; search, stars, albums, selections, imports, a viewer.
import {
	api,
	app,
	Button,
	bytes,
	Confirm,
	cx,
	Empty,
	Field,
	html,
	Icon,
	navigate,
	printable,
	remember,
	Search,
	Select,
	showError,
	texts,
	toast,
	useBusy,
	useEffect,
	usePageDrop,
	useRef,
	useRoute,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {AlbumName} from "./gallery/albums.js"
import {addImages, Import} from "./gallery/import.js"
import {Selection, trashSelected} from "./gallery/selection.js"
import {
	address,
	clear,
	filter,
	gallery,
	isFiltered,
	load,
	loadMore,
	read,
	selectAll,
	selectedIds,
	showAll,
	star,
	toggle
} from "./gallery/state.js"
import {t} from "./gallery/strings.js"
import {Viewer} from "./gallery/viewer.js"

export function View() {
	const {capabilities} = useStore(app)
	if (!capabilities) return html`<h1 class="visually-hidden">${t.title}</h1>`
	if (!capabilities.features.includes("gallery"))
		return html`<h1 class="visually-hidden">${t.title}</h1><${Empty} name="gallery" title=${t.never} text=${t.neverText} />`
	return html`<${Shelf} />`
}

function Shelf() {
	const {ended} = useStore(app)
	const {params} = useRoute()
	const {filters, images, total, facets, selected} = useStore(gallery)
	const [importing, setImporting] = useState(false)
	const [busy, during] = useBusy()
	const veil = usePageDrop(files => {
		setImporting(true)
		addImages(files)
	}, t.imports.hint)
	useEffect(() => {
		const wanted = read()
		if (JSON.stringify(wanted) !== JSON.stringify(gallery.get().filters)) filter(wanted).catch(showError)
	}, [params])
	useEffect(() => {
		load().catch(showError) // also when a job has ended
	}, [ended])
	useEffect(() => remember("gallery", {...address(filters), image: params.image}), [filters])
	useShortcuts(t.title, [
		["/", t.keys.search, () => /** @type {HTMLElement | null} */ (document.querySelector("[type=search]"))?.focus()],
		["mod+a", t.keys.selectAll, selectAll, true],
		["Escape", t.keys.clear, clear],
		["s", t.keys.star, () => selected.size && star(selectedIds(), true).catch(showError)],
		["Delete", t.keys.delete, () => selected.size && !filters.trashed && trashSelected().catch(showError)]
	])
	const refresh = async () => {
		const {read: files, missing, skipped} = await api("/v1/gallery/refresh", {method: "POST"})
		await load()
		toast(t.refreshed(files, missing), skipped ? {kind: "warning", details: [t.skipped(skipped)]} : {})
	}
	/** @param {string} id */
	const open = id => navigate("gallery", {...address(filters), image: id})
	const count = filters.trashed
		? t.inTrash(total, facets?.trash_days ?? 0)
		: isFiltered(filters)
			? t.found(total)
			: t.count(total, total ? bytes(facets?.bytes ?? 0) : "")
	return html`<header class="view-head">
			<div>
				<h1>${t.title}</h1>
				<p role="status">${images ? count : ""}</p>
			</div>
			<div class="row">
				<${Button} icon="upload" onClick=${() => setImporting(true)}>${t.imports.button}<//>
				<${Button} icon="reuse" label=${t.refresh} busy=${busy} onClick=${() => during(refresh())} />
			</div>
		</header>
		<${Tools} />
		${images?.length === 0 ? html`<${Nothing} />` : html`<${Grid} open=${open} />`}
		<${Selection} />
		${params.image && html`<${Viewer} id=${params.image} onClose=${() => navigate("gallery", address(gallery.get().filters))} />`}
		${importing && html`<${Import} onClose=${() => setImporting(false)} />`}
		${veil}`
}

function Nothing() {
	const {filters} = useStore(gallery)
	if (filters.trashed)
		return html`<${Empty} name="trash" title=${t.emptyTrash}><${Button} onClick=${() => showAll().catch(showError)}>${t.showAll}<//><//>`
	return isFiltered(filters)
		? html`<${Empty} name="gallery" title=${t.nothingTitle} text=${t.nothingText}><${Button} onClick=${() => showAll().catch(showError)}>${t.showAll}<//><//>`
		: html`<${Empty} name="gallery" title=${t.emptyTitle} text=${t.emptyText} />`
}

/** Search, filters, and what can be done with the album or the trash that is shown. */
function Tools() {
	const {filters, facets, albums} = useStore(gallery)
	const [words, setWords] = useState(filters.q)
	const [asking, setAsking] = useState(false)
	const timer = useRef(0)
	useEffect(() => setWords(filters.q), [filters.q])
	/** @param {Partial<GalleryFilters>} patch */
	const change = patch => filter(patch).catch(showError)
	/** @param {string} q */
	const search = q => {
		setWords(q)
		clearTimeout(timer.current)
		timer.current = setTimeout(() => change({q}), 250)
	}
	/** @type {(rows: Counted[], chosen: string, any: string) => [string, string][]} */
	const choices = (rows, chosen, any) => {
		const known = chosen && !rows.some(each => each.name === chosen) ? [{name: chosen, images: 0}, ...rows] : rows
		return [
			["", any],
			...known.map(each => /** @type {[string, string]} */ ([each.name, `${printable(each.name)} (${each.images})`]))
		]
	}
	const purge = () =>
		api("/v1/gallery/purge", {json: {}}).then(({purged}) => {
			toast(t.purged(purged))
			return load()
		})
	return html`<div class="gallery-tools">
		<${Field} label=${t.search}>
			${id => html`<${Search} id=${id} placeholder=${t.searchHint} value=${words} onChange=${search} />`}
		<//>
		<${Select} label=${t.album} value=${filters.album} options=${[["", t.anyAlbum], ...albums.map(each => [each.id, `${printable(each.name)} (${each.images})`])]} onChange=${album => change({album})} />
		<${Select} label=${t.lora} value=${filters.lora} options=${choices(facets?.loras ?? [], filters.lora, t.anyLora)} onChange=${lora => change({lora})} />
		${(facets?.models.length ?? 0) > 1 || filters.model ? html`<${Select} label=${t.model} value=${filters.model} options=${choices(facets?.models ?? [], filters.model, t.anyModel)} onChange=${model => change({model})} />` : null}
		<div class="row wrap gallery-chips">
			<button type="button" class="chip" aria-pressed=${filters.starred} onClick=${() => change({starred: !filters.starred})}><${Icon} name="star" />${t.starred}</button>
			${facets && (facets.trashed > 0 || filters.trashed) ? html`<button type="button" class="chip" aria-pressed=${filters.trashed} onClick=${() => change({trashed: !filters.trashed})}><${Icon} name="trash" />${t.trash(facets.trashed)}</button>` : null}
			${filters.album && html`<${AlbumName} key=${filters.album} id=${filters.album} />`}
			${filters.trashed && facets?.trashed ? html`<${Button} size="small" kind="danger" onClick=${() => setAsking(true)}>${t.purgeAll}<//>` : null}
		</div>
		${asking && html`<${Confirm} title=${t.purgeTitle(facets?.trashed ?? 0)} text=${t.purgeText} confirm=${t.purge} onConfirm=${() => purge().catch(showError)} onClose=${() => setAsking(false)} />`}
	</div>`
}

/** @param {{ open: (id: string) => void }} props */
function Grid({open}) {
	const {images, next, selected} = useStore(gallery)
	const end = useRef(/** @type {HTMLElement | null} */ (null))
	useEffect(() => {
		if (next === null || !end.current) return
		const near = new IntersectionObserver(([entry]) => entry.isIntersecting && loadMore().catch(showError), {
			rootMargin: "1200px"
		})
		near.observe(end.current)
		return () => near.disconnect()
	}, [next])
	return html`<ul class=${cx("tiles gallery-grid gallery-shelf", selected.size > 0 && "gallery-selecting")} aria-label=${t.grid} onKeyDown=${walk}>
			${images?.map(row => html`<${Tile} key=${row.id} row=${row} selected=${selected.has(row.id)} selecting=${selected.size > 0} open=${open} />`)}
		</ul>
		${next !== null && html`<div class="gallery-more" ref=${end}><${Button} onClick=${() => loadMore().catch(showError)}>${texts.actions.more}<//></div>`}`
}

/** Arrow keys move from image to image; a focused control leaves these keys to the list. @param {KeyboardEvent} event */
function walk(event) {
	const {selected, filters} = gallery.get()
	if (event.key === "Escape") return clear()
	if (event.key === "Delete" && selected.size && !filters.trashed) trashSelected().catch(showError)
	const from = event.target instanceof HTMLElement ? event.target.closest("li") : null
	const step = {ArrowRight: 1, ArrowLeft: -1, ArrowDown: 0, ArrowUp: 0}[event.key]
	if (!from || step === undefined) return
	const items = [...(from.parentElement?.children ?? [])]
	const columns = items.filter(each => /** @type {HTMLElement} */ (each).offsetTop === from.offsetTop).length
	const by = step || (event.key === "ArrowDown" ? columns : -columns)
	const to = items[items.indexOf(from) + by]?.querySelector("button")
	event.preventDefault()
	to?.focus()
}

/** @param {TileProps} props */
function Tile({row, selected, selecting, open}) {
	const name = printable(row.prompt.slice(0, 200)) || row.name || t.noPrompt
	/** @param {MouseEvent} event */
	const press = event => {
		if (event.shiftKey || event.ctrlKey || event.metaKey || selecting) toggle(row.id, event.shiftKey)
		else open(row.id)
	}
	return html`<li class="gallery-tile" data-selected=${selected}>
		<button type="button" class="gallery-item cover" aria-label=${selecting ? t.select(name) : t.open(name)} title=${name} onClick=${press}>
			<img src=${row.thumbnail} alt="" loading="lazy" decoding="async" width=${row.width} height=${row.height} />
		</button>
		<label class="gallery-check">
			<input type="checkbox" aria-label=${t.select(name)} checked=${selected} onClick=${event => {
				event.preventDefault() // the store decides
				toggle(row.id, event.shiftKey)
			}} />
		</label>
		<button type="button" class="gallery-star" aria-pressed=${row.starred} aria-label=${row.starred ? t.unstar(name) : t.star(name)} onClick=${() => star([row.id], !row.starred).catch(showError)}><${Icon} name="star" /></button>
	</li>`
}
