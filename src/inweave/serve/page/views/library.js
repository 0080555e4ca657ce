// Library: the worker's LoRAs as cards and as a table, with what is known of each; files are added by dropping them.
import { html, useEffect, useMemo, useState } from "../lib/dom.js";
import { bytes } from "../lib/format.js";
import { useShortcuts } from "../lib/keys.js";
import { currentParams, href, navigate, remember, useRoute } from "../lib/router.js";
import { app } from "../lib/state.js";
import { persisted, useStore } from "../lib/store.js";
import { loadLoras, rescan } from "../lib/worker.js";
import { t } from "../strings.js";
import { Button } from "../ui/button.js";
import { DropZone, usePageDrop } from "../ui/dropzone.js";
import { Empty } from "../ui/empty.js";
import { Field, Segmented, Select } from "../ui/field.js";
import { Icon } from "../ui/icons.js";
import { Swatch } from "../ui/swatch.js";
import { showError } from "../ui/toast.js";
import { Details } from "./library/details.js";
import { addFiles, Uploads } from "./library/upload.js";

const PAGE = 60;
const layout = persisted("library-layout", "cards");
const ORDERS = /** @type {Record<string, (a: Lora, b: Lora) => number>} */ ({
	name: (a, b) => a.name.localeCompare(b.name),
	newest: (a, b) => b.modified - a.modified,
	size: (a, b) => b.size - a.size,
});

export function View() {
	const loras = useStore(app, (state) => state.loras);
	const { params } = useRoute();
	const [filters, setFilters] = useState(() => {
		const { query = "", base = "", only = "", sort = "name", layout: shape = layout.read() } = currentParams();
		return { query, base, only, sort: sort in ORDERS ? sort : "name", layout: shape };
	});
	const [limit, setLimit] = useState(PAGE);
	const [scanning, setScanning] = useState(false);
	const change = (/** @type {Partial<typeof filters>} */ patch) => {
		setFilters((before) => ({ ...before, ...patch }));
		setLimit(PAGE);
	};
	useEffect(() => {
		layout.write(filters.layout);
		remember("library", { ...address(filters), lora: params.lora });
	}, [filters, params.lora]);
	useEffect(() => {
		loadLoras().catch(showError);
	}, []);
	const over = usePageDrop((files) => addFiles(files));
	const twins = useMemo(() => duplicates(loras ?? []), [loras]);
	const shown = useMemo(() => select(loras ?? [], filters, twins), [loras, filters, twins]);
	const group = t.library.title;
	useShortcuts([
		{ keys: "/", label: t.library.search, group, run: focusSearch },
		{
			keys: "v",
			label: t.library.keys.layout,
			group,
			run: () => change({ layout: filters.layout === "cards" ? "table" : "cards" }),
		},
	]);
	const refresh = () => {
		setScanning(true);
		rescan()
			.catch(showError)
			.finally(() => setScanning(false));
	};
	if (loras === null) return html`<h1 class="visually-hidden">${t.library.title}</h1>`;
	return html`<header class="view-head">
			<div>
				<h1>${t.library.title}</h1>
				<p>${t.library.count(loras.length, shown.length)}</p>
			</div>
			<div class="row">
				<${Segmented}
					label=${t.library.layout}
					value=${filters.layout}
					options=${[{ value: "cards", label: t.library.cards }, { value: "table", label: t.library.table }]}
					onChange=${(/** @type {string} */ value) => change({ layout: value })}
				/>
				<${Button} icon="reuse" label=${t.library.refresh} busy=${scanning} onClick=${refresh} />
			</div>
		</header>
		<div class="library-tools">
			<${Filters} loras=${loras} twins=${twins} filters=${filters} change=${change} />
			<${DropZone} onFiles=${addFiles} accept=".safetensors" label=${t.library.drop} multiple compact />
		</div>
		<${Uploads} />
		${
			shown.length === 0
				? html`<${Empty}
						name="library"
						title=${loras.length ? t.library.nothingTitle : t.library.emptyTitle}
						text=${loras.length ? t.library.nothingText : t.library.emptyText}
					>
						${
							loras.length > 0 &&
							html`<${Button} onClick=${() => change({ query: "", base: "", only: "" })}>${t.library.showAll}<//>`
						}
					<//>`
				: filters.layout === "table"
					? html`<${Table} loras=${shown.slice(0, limit)} twins=${twins} filters=${filters} />`
					: html`<ul class="library-cards">
							${shown.slice(0, limit).map((lora) => html`<${Card} key=${lora.id} lora=${lora} twins=${twins} filters=${filters} />`)}
						</ul>`
		}
		${
			shown.length > limit &&
			html`<div class="library-more"><${Button} onClick=${() => setLimit(limit + PAGE)}>${t.library.more(shown.length - limit)}<//></div>`
		}
		${
			params.lora &&
			html`<${Details} key=${params.lora} id=${params.lora} twins=${twins} onClose=${() => navigate("library", address(filters))} />`
		}
		${over && html`<div class="drop-veil">${t.library.drop}</div>`}`;
}

const focusSearch = () => /** @type {HTMLElement | null} */ (document.querySelector(".library-search"))?.focus();

/** @param {{ query: string, base: string, only: string, sort: string, layout: string }} filters */
const address = ({ query, base, only, sort, layout: shape }) => ({
	query,
	base,
	only,
	sort: sort === "name" ? "" : sort,
	layout: shape === "cards" ? "" : shape,
});

/**
 * Files with the same contents, by id.
 * @param {Lora[]} loras
 */
function duplicates(loras) {
	const groups = Map.groupBy(
		loras.filter((lora) => lora.hashes),
		(lora) => lora.hashes?.sha256,
	);
	/** @type {Map<string, Lora[]>} */
	const twins = new Map();
	for (const same of groups.values()) {
		if (same.length > 1) for (const lora of same) twins.set(lora.id, same);
	}
	return twins;
}

/**
 * @param {Lora[]} loras
 * @param {{ query: string, base: string, only: string, sort: string }} filters
 * @param {Map<string, Lora[]>} twins
 */
function select(loras, { query, base, only, sort }, twins) {
	const words = query.toLowerCase().split(/\s+/).filter(Boolean);
	return loras
		.filter((lora) => {
			if (base && (lora.base ?? "?") !== base) return false;
			if (only === "problems" && !lora.health.length) return false;
			if (only === "duplicates" && !twins.has(lora.id)) return false;
			const text = [
				lora.name,
				lora.path,
				lora.title,
				lora.base,
				lora.description,
				...lora.algorithms,
				...lora.triggers.flatMap((each) => each.words),
				...Object.values(lora.hashes ?? {}),
			];
			const all = text.filter(Boolean).join("\n").toLowerCase();
			return words.every((word) => all.includes(word));
		})
		.sort(ORDERS[sort]);
}

/** @param {{ loras: Lora[], twins: Map<string, Lora[]>, filters: any, change: (patch: any) => void }} props */
function Filters({ loras, twins, filters, change }) {
	const counts = Map.groupBy(loras, (lora) => lora.base ?? "?");
	const bases = [...counts.keys()].sort();
	const problems = loras.filter((lora) => lora.health.length).length;
	const chips = [
		{ value: "problems", label: t.library.problems(problems), count: problems },
		{ value: "duplicates", label: t.library.duplicates(twins.size), count: twins.size },
	].filter((each) => each.count > 0 || filters.only === each.value);
	return html`<div class="library-filters">
		<${Field} label=${t.library.search}>
			${(/** @type {string} */ id) => html`<div class="search">
				<${Icon} name="search" />
				<input
					id=${id}
					class="input library-search"
					type="search"
					placeholder=${t.library.searchHint}
					value=${filters.query}
					onInput=${(/** @type {any} */ e) => change({ query: e.currentTarget.value })}
				/>
			</div>`}
		<//>
		<${Select}
			label=${t.library.base}
			value=${filters.base}
			options=${[
				{ value: "", label: t.library.anyBase(loras.length) },
				...bases.map((base) => ({
					value: base,
					label: `${base === "?" ? t.library.unknownBase : base} (${counts.get(base)?.length})`,
				})),
			]}
			onChange=${(/** @type {string} */ base) => change({ base })}
		/>
		<${Select}
			label=${t.library.sort}
			value=${filters.sort}
			options=${Object.keys(ORDERS).map((value) => ({ value, label: t.library.orders[value] }))}
			onChange=${(/** @type {string} */ sort) => change({ sort })}
		/>
		${
			chips.length > 0 &&
			html`<div class="row wrap library-chips">
				${chips.map(
					(each) => html`<button
						key=${each.value}
						type="button"
						class="chip"
						aria-pressed=${filters.only === each.value ? "true" : "false"}
						onClick=${() => change({ only: filters.only === each.value ? "" : each.value })}
					>${each.label}</button>`,
				)}
			</div>`
		}
	</div>`;
}

/** @param {{ lora: Lora }} props  its preview, or a cloth woven from its name */
export const Picture = ({ lora }) =>
	lora.preview
		? html`<img src=${`/v1/loras/${lora.id}/preview`} alt="" loading="lazy" decoding="async" />`
		: html`<${Swatch} name=${lora.name} />`;

/** @param {{ lora: Lora, twins: Map<string, Lora[]> }} props */
const Health = ({ lora, twins }) => html`${
	lora.health.length > 0 &&
	html`<span class=${lora.error ? "badge badge-bad" : "badge badge-warning"}>${lora.error ? t.library.unreadable : t.library.problem(lora.health.length)}</span>`
}
${twins.has(lora.id) && html`<span class="badge">${t.library.duplicate}</span>`}
${!lora.health.length && lora.checked && !twins.has(lora.id) && html`<span class="badge badge-good">${t.library.healthy}</span>`}
${!lora.health.length && !lora.checked && html`<span class="badge">${t.library.notRead}</span>`}`;

/** @param {{ lora: Lora, twins: Map<string, Lora[]>, filters: any }} props */
const Card = ({ lora, twins, filters }) => html`<li>
	<a class="card library-card" href=${href("library", { ...address(filters), lora: lora.id })}>
		<span class="library-picture"><${Picture} lora=${lora} /></span>
		<span class="library-name">${lora.name}</span>
		<span class="muted small">${[algorithm(lora), bytes(lora.size)].filter(Boolean).join(" · ")}</span>
		<span class="row wrap">
			<span class="badge badge-active">${lora.base ?? t.library.unknownBase}</span>
			<${Health} lora=${lora} twins=${twins} />
		</span>
	</a>
</li>`;

/** @param {Lora} lora */
export const algorithm = (lora) =>
	[lora.algorithms.slice(0, 2).join(", "), lora.ranks.length ? t.library.rank(lora.ranks) : ""]
		.filter(Boolean)
		.join(" ");

/** @param {{ loras: Lora[], twins: Map<string, Lora[]>, filters: any }} props */
const Table = ({
	loras,
	twins,
	filters,
}) => html`<div class="card library-scroll" tabindex="0" role="region" aria-label=${t.library.table}>
	<table class="library-table">
		<thead>
			<tr>${t.library.columns.map((name) => html`<th scope="col">${name}</th>`)}</tr>
		</thead>
		<tbody>
			${loras.map(
				(lora) => html`<tr key=${lora.id}>
					<th scope="row"><a href=${href("library", { ...address(filters), lora: lora.id })}>${lora.name}</a></th>
					<td>${lora.base ?? t.library.unknownBase}</td>
					<td>${lora.algorithms.join(", ")}</td>
					<td class="num">${lora.ranks.join(", ")}</td>
					<td class="library-words">${words(lora).slice(0, 4).join(", ")}</td>
					<td class="mono">${lora.hashes?.autov2 ?? ""}</td>
					<td class="num">${bytes(lora.size)}</td>
					<td><span class="row"><${Health} lora=${lora} twins=${twins} /></span></td>
				</tr>`,
			)}
		</tbody>
	</table>
</div>`;

/** @param {Lora} lora its trigger words, each once */
export const words = (lora) => [...new Set(lora.triggers.flatMap((each) => each.words))];
