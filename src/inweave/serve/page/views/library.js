// Library: the worker's LoRAs as cards or as a table.
import {
	app,
	Button,
	bytes,
	currentParams,
	DropZone,
	Empty,
	Field,
	href,
	html,
	LoraImage,
	loadLoras,
	navigate,
	persisted,
	printable,
	remember,
	rescan,
	Search,
	Segmented,
	Select,
	showError,
	triggerWords,
	useBusy,
	useEffect,
	useMemo,
	usePageDrop,
	useRoute,
	useShortcuts,
	useState,
	useStore
} from "../kit.js"
import {algorithm, Details} from "./library/details.js"
import {MakeSamples} from "./library/samples.js"
import {t} from "./library/strings.js"
import {addFiles, Uploads} from "./library/upload.js"

const PAGE = 60
const layout = persisted("library-layout", "cards")
/** @type {Record<string, (a: Lora, b: Lora) => number>} */
const ORDERS = {
	name: (a, b) => a.display_name.localeCompare(b.display_name),
	newest: (a, b) => b.modified - a.modified,
	size: (a, b) => b.size - a.size
}

export function View() {
	const {loras} = useStore(app)
	const {params} = useRoute()
	const [filters, setFilters] = useState(read)
	useEffect(() => setFilters(read()), [params])
	const [limit, setLimit] = useState(PAGE)
	const [scanning, during] = useBusy()
	/** @param {Partial<LibraryFilters>} patch */
	const change = patch => {
		setFilters(before => ({...before, ...patch}))
		setLimit(PAGE)
	}
	useEffect(() => {
		layout.write(filters.layout)
		remember("library", {...address(filters), lora: params.lora})
	}, [filters, params.lora])
	useEffect(() => {
		loadLoras().catch(showError)
	}, [])
	const veil = usePageDrop(addFiles, t.drop)
	const twins = useMemo(() => duplicates(loras ?? []), [loras])
	const shown = useMemo(() => select(loras ?? [], filters, twins), [loras, filters, twins])
	useShortcuts(t.title, [
		["/", t.search, focusSearch],
		["v", t.keys.layout, () => change({layout: filters.layout === "cards" ? "table" : "cards"})]
	])
	if (loras === null) return html`<h1 class="visually-hidden">${t.title}</h1>`
	return html`<header class="view-head">
			<div>
				<h1>${t.title}</h1>
				<p>${t.count(loras.length, shown.length)}</p>
			</div>
			<div class="row wrap">
				<${MakeSamples} loras=${loras} />
				<${Segmented}
					label=${t.layout}
					value=${filters.layout}
					options=${t.layouts}
					onChange=${value => change({layout: value})}
				/>
				<${Button} icon="reuse" label=${t.refresh} busy=${scanning} onClick=${() => during(rescan())} />
			</div>
		</header>
		<div class="library-tools">
			<${Filters} loras=${loras} twins=${twins} filters=${filters} change=${change} />
			<${DropZone} onFiles=${addFiles} accept=".safetensors" label=${t.drop} multiple compact />
		</div>
		<${Uploads} />
		${
			shown.length === 0
				? html`<${Empty}
						name="library"
						title=${loras.length ? t.nothingTitle : t.emptyTitle}
						text=${loras.length ? t.nothingText : t.emptyText}
					>
						${loras.length > 0 && html`<${Button} onClick=${() => change({query: "", base: "", only: ""})}>${t.showAll}<//>`}
					<//>`
				: filters.layout === "table"
					? html`<${Table} loras=${shown.slice(0, limit)} twins=${twins} filters=${filters} />`
					: html`<ul class="tiles library-cards">
							${shown.slice(0, limit).map(lora => html`<${Card} key=${lora.id} lora=${lora} twins=${twins} filters=${filters} />`)}
						</ul>`
		}
		${shown.length > limit && html`<div class="library-more"><${Button} onClick=${() => setLimit(limit + PAGE)}>${t.more(shown.length - limit)}<//></div>`}
		${params.lora && html`<${Details} key=${params.lora} id=${params.lora} twins=${twins} onClose=${() => navigate("library", address(filters))} />`}
		${veil}`
}

/** The filters of the address. */
function read() {
	const {query = "", base = "", only = "", sort = "name", layout: shape = layout.read()} = currentParams()
	return {query, base, only, sort: sort in ORDERS ? sort : "name", layout: shape}
}

const focusSearch = () => /** @type {HTMLElement | null} */ (document.querySelector("[type=search]"))?.focus()

/** @param {LibraryFilters} filters */
const address = ({query, base, only, sort, layout: shape}) => ({
	query,
	base,
	only,
	sort: sort === "name" ? "" : sort,
	layout: shape === "cards" ? "" : shape
})

/** Files with the same contents, by id. @param {Lora[]} loras */
function duplicates(loras) {
	const groups = Map.groupBy(
		loras.filter(lora => lora.hashes),
		lora => lora.hashes?.sha256
	)
	/** @type {Twins} */
	const twins = new Map()
	for (const same of groups.values()) {
		if (same.length > 1) for (const lora of same) twins.set(lora.id, same)
	}
	return twins
}

/** @param {Lora[]} loras @param {LibraryFilters} filters @param {Twins} twins */
function select(loras, {query, base, only, sort}, twins) {
	const words = query.toLowerCase().split(/\s+/).filter(Boolean)
	return loras
		.filter(lora => {
			if (base && (lora.base ?? "?") !== base) return false
			if (only === "problems" && !lora.health.length) return false
			if (only === "duplicates" && !twins.has(lora.id)) return false
			const text = [
				lora.display_name,
				lora.alias,
				lora.path,
				lora.title,
				lora.base,
				lora.description,
				...lora.algorithms,
				...triggerWords(lora),
				...Object.values(lora.hashes ?? {})
			]
			const all = text.filter(Boolean).join("\n").toLowerCase()
			return words.every(word => all.includes(word))
		})
		.sort(ORDERS[sort])
}

/** @param {FiltersProps} props */
function Filters({loras, twins, filters, change}) {
	const counts = Map.groupBy(loras, lora => lora.base ?? "?")
	const bases = [...counts.keys()].sort()
	const problems = loras.filter(lora => lora.health.length).length
	const chips = [
		{value: "problems", label: t.problems(problems), count: problems},
		{value: "duplicates", label: t.duplicates(twins.size), count: twins.size}
	].filter(each => each.count > 0 || filters.only === each.value)
	return html`<div class="library-filters">
		<${Field} label=${t.search}>
			${id => html`<${Search} id=${id} placeholder=${t.searchHint} value=${filters.query} onChange=${query => change({query})} />`}
		<//>
		<${Select}
			label=${t.base}
			value=${filters.base}
			options=${[["", t.anyBase(loras.length)], ...bases.map(base => [base, `${base === "?" ? t.unknownBase : base} (${counts.get(base)?.length})`])]}
			onChange=${base => change({base})}
		/>
		<${Select} label=${t.sort} value=${filters.sort} options=${t.orders} onChange=${sort => change({sort})} />
		${
			chips.length > 0 &&
			html`<div class="row wrap library-chips">
				${chips.map(
					each => html`<button
						key=${each.value}
						type="button"
						class="chip"
						aria-pressed=${filters.only === each.value}
						onClick=${() => change({only: filters.only === each.value ? "" : each.value})}
					>${each.label}</button>`
				)}
			</div>`
		}
	</div>`
}

/** @param {{ lora: Lora, twins: Twins }} props */
const Health = ({lora, twins}) => html`${
	lora.health.length > 0 &&
	html`<span class=${lora.error ? "badge badge-bad" : "badge badge-warning"}>${lora.error ? t.unreadable : t.problem(lora.health.length)}</span>`
}
${twins.has(lora.id) && html`<span class="badge">${t.duplicate}</span>`}
${!lora.health.length && lora.checked && !twins.has(lora.id) && html`<span class="badge badge-good">${t.healthy}</span>`}
${!lora.health.length && !lora.checked && html`<span class="badge">${t.notRead}</span>`}`

/** @param {{ lora: Lora, twins: Twins, filters: LibraryFilters }} props */
const Card = ({lora, twins, filters}) => html`<li>
	<a class="card library-card" href=${href("library", {...address(filters), lora: lora.id})}>
		<span class="library-image cover"><${LoraImage} lora=${lora} name=${lora.name} /></span>
		<span class="library-name">${lora.display_name}</span>
		${lora.path !== `${lora.name}.safetensors` && html`<span class="muted small clip" title=${printable(lora.path)}>${printable(lora.path)}</span>`}
		<span class="muted small">${[algorithm(lora), bytes(lora.size)].filter(Boolean).join(" · ")}</span>
		<span class="row wrap">
			<span class="badge badge-active">${lora.base ?? t.unknownBase}</span>
			<${Health} lora=${lora} twins=${twins} />
		</span>
	</a>
</li>`

/** @param {{ loras: Lora[], twins: Twins, filters: LibraryFilters }} props */
const Table = ({
	loras,
	twins,
	filters
}) => html`<div class="card library-scroll" tabindex="0" role="region" aria-label=${t.layouts.table}>
	<table class="library-table">
		<thead>
			<tr>${t.columns.map(name => html`<th scope="col">${name}</th>`)}</tr>
		</thead>
		<tbody>
			${loras.map(
				lora => html`<tr key=${lora.id}>
					<th scope="row"><a href=${href("library", {...address(filters), lora: lora.id})}>${lora.display_name}</a><div class="muted small library-file">${printable(lora.path)}</div></th>
					<td>${lora.base ?? t.unknownBase}</td>
					<td>${lora.algorithms.join(", ")}</td>
					<td class="num">${lora.ranks.join(", ")}</td>
					<td class="library-words">${triggerWords(lora).slice(0, 4).join(", ")}</td>
					<td class="mono">${lora.hashes?.autov2 ?? ""}</td>
					<td class="num">${bytes(lora.size)}</td>
					<td><span class="row"><${Health} lora=${lora} twins=${twins} /></span></td>
				</tr>`
			)}
		</tbody>
	</table>
</div>`
