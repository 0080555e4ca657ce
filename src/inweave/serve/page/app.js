// The frame: navigation, the current view, messages, the token form, the sheet of shortcuts.
import {
	allowSingleKeys,
	app,
	Button,
	Check,
	clearErrors,
	cx,
	Dialog,
	Empty,
	href,
	html,
	Icon,
	keyNames,
	navigate,
	persisted,
	shortcuts,
	showError,
	submits,
	Text,
	Toasts,
	texts,
	useBusy,
	useEffect,
	useRoute,
	useShortcuts,
	useState,
	useStore
} from "./kit.js"
import {lock, unlock} from "./lib/session.js"

/** The views in the order of the navigation. @type {Record<string, Loader>} */
const VIEWS = {
	generate: () => import("./views/generate.js"),
	compare: () => styled("compare", import("./views/compare.js")),
	edit: () => styled("edit", import("./views/edit.js")),
	library: () => styled("library", import("./views/library.js")),
	train: () => styled("train", import("./views/train.js")),
	queue: () => styled("queue", import("./views/queue.js"))
}
const NAMES = Object.keys(VIEWS)
const stored = persisted("theme", "auto")
/** @type {Record<Theme, Theme>} */
const NEXT = {auto: "light", light: "dark", dark: "auto"}
const titles = texts.nav

export function App() {
	const {session} = useStore(app)
	const {view: name} = useRoute()
	const current = NAMES.includes(name) ? name : "generate"
	const [sheet, setSheet] = useState(false)
	const [theme, nextTheme] = useTheme()
	const views = NAMES.map(
		(each, index) => /** @type {const} */ ([`${index + 1}`, texts.keys.view(titles[each]), () => navigate(each)])
	)
	useShortcuts(texts.keys.everywhere, [
		...views,
		["t", texts.keys.theme, nextTheme],
		["?", texts.keys.sheet, () => setSheet(true)]
	])
	useEffect(() => {
		clearErrors()
		document.title = `${titles[current]} · ${texts.app.name}`
	}, [current])
	if (session === "locked") return html`<${Lock} /><${Toasts} />`
	return html`<div class="shell">
			<a class="skip" href="#view" onClick=${event => {
				event.preventDefault()
				document.getElementById("view")?.focus()
			}}>${texts.app.skip}</a>
			<div class="rail">
				<a class="rail-mark" href=${href("generate")} aria-label=${texts.app.name}><span class="mark"></span></a>
				<${Navigation} current=${current} />
				<div class="rail-foot">
					<${Button} kind="quiet" icon=${{auto: "auto", light: "sun", dark: "moon"}[theme]} label=${texts.app.theme[theme]} onClick=${nextTheme} />
					<${Button} kind="quiet" icon="help" label=${texts.app.shortcuts} onClick=${() => setSheet(true)} />
					<${LockButton} />
				</div>
			</div>
			<div class="column">
				<${Notices} />
				<main class=${cx("view", `view-${current}`)} id="view" tabindex="-1"><${ViewOf} key=${current} name=${current} /></main>
			</div>
		</div>
		${sheet && html`<${Sheet} onClose=${() => setSheet(false)} />`}
		<${Toasts} />`
}

/** @param {{ current: string }} props */
function Navigation({current}) {
	const waiting = useStore(app).active?.length ?? 0
	return html`<nav class="rail-nav" aria-label=${texts.app.navigation}>
		${NAMES.map(
			name => html`<a key=${name} class="rail-link" href=${href(name)} aria-current=${name === current ? "page" : undefined}>
				<${Icon} name=${name} />
				<span>${titles[name]}</span>
				${name === "queue" && waiting > 0 && html`<span class="rail-badge num">${waiting > 99 ? "99+" : waiting}</span>`}
			</a>`
		)}
	</nav>`
}

/** A view once its own stylesheet is loaded. @param {string} name @param {ReturnType<Loader>} view @returns {ReturnType<Loader>} */
async function styled(name, view) {
	const href = new URL(`./css/${name}.css`, import.meta.url).href
	if (!document.querySelector(`link[href="${href}"]`)) {
		const link = Object.assign(document.createElement("link"), {rel: "stylesheet", href})
		await new Promise((resolve, reject) => {
			link.onload = resolve
			link.onerror = reject
			document.head.append(link)
		}).catch(error => {
			link.remove()
			throw error
		})
	}
	return view
}

/** @param {{ name: string }} props */
function ViewOf({name}) {
	const [loaded, setLoaded] = useState(/** @type {{ View?: any, failed?: boolean }} */ ({}))
	const {loras, capabilities, ended} = useStore(app)
	const known = Boolean(loras && capabilities && ended)
	const [waited, setWaited] = useState(false)
	useEffect(() => {
		VIEWS[name]().then(
			({View}) => setLoaded({View}),
			() => setLoaded({failed: true})
		)
	}, [name])
	// the view waits for the worker's state, so that nothing moves afterwards, but not for long
	useEffect(() => {
		const timer = setTimeout(() => setWaited(true), 1500)
		return () => clearTimeout(timer)
	}, [])
	if (loaded.failed) {
		return html`<${Empty} name="failed" title=${texts.app.viewFailed}><${Button} kind="primary" onClick=${() => location.reload()}>${texts.app.reload}<//><//>`
	}
	return loaded.View && (known || waited) ? html`<${loaded.View} />` : null
}

function Notices() {
	const {online, notReady} = useStore(app)
	return html`<div class="notices" role="status">
		${
			!online
				? html`<div class="row notice-strip"><${Icon} name="warning" />${texts.app.offline}</div>`
				: notReady !== null &&
					html`<div class="row notice-strip"><${Icon} name="info" />${texts.app.notReady(notReady)}</div>`
		}
	</div>`
}

function LockButton() {
	const {tokenRequired} = useStore(app)
	return (
		tokenRequired &&
		html`<${Button} kind="quiet" icon="lock" label=${texts.app.lock} onClick=${() => lock().catch(showError)} />`
	)
}

function Lock() {
	const [token, setToken] = useState("")
	const [wrong, setWrong] = useState(false)
	const [busy, during] = useBusy()
	const open = () => {
		/** @param {{ status?: number }} error */
		const failed = error => {
			setWrong(error.status === 401)
			throw error
		}
		during(unlock(token.trim()).catch(failed))
	}
	return html`<main class="lock">
		<form class="card stack lock-card" onSubmit=${submits(open)}>
			<span class="mark"></span>
			<div>
				<h1>${texts.session.title}</h1>
				<p class="muted">${texts.session.text}</p>
			</div>
			<${Text}
				label=${texts.session.token}
				type="password"
				autocomplete="current-password"
				autofocus
				required
				value=${token}
				aria-invalid=${wrong}
				aria-describedby="token-wrong"
				onChange=${setToken}
			/>
			<p id="token-wrong" class="field-error" role="alert">${wrong ? texts.session.wrong : ""}</p>
			<${Button} kind="primary" size="large" type="submit" busy=${busy}>${texts.session.open}<//>
		</form>
	</main>`
}

/** @param {{ onClose: () => void }} props */
function Sheet({onClose}) {
	const {list, singleKeys} = useStore(shortcuts)
	const groups = Map.groupBy(list, each => each.group)
	return html`<${Dialog} title=${texts.keys.title} onClose=${onClose} wide>
		<div class="keysheet">
			${[...groups].reverse().map(
				([group, entries]) => html`<section key=${group}>
					<h3>${group}</h3>
					<dl>
						${entries.map(
							each => html`<div>
								<dt>${each.label}</dt>
								<dd>${keyNames(each.keys).map(key => html`<kbd>${key}</kbd>`)}</dd>
							</div>`
						)}
					</dl>
				</section>`
			)}
		</div>
		<div>
			<${Check} label=${texts.keys.single} checked=${singleKeys} onChange=${allowSingleKeys} />
			<p class="field-hint">${texts.keys.singleHint}</p>
		</div>
	<//>`
}

/** The chosen theme, which theme.js reads before the first paint. @returns {[Theme, () => void]} */
function useTheme() {
	const [theme, setTheme] = useState(/** @type {Theme} */ (document.documentElement.dataset.theme ?? "auto"))
	const next = () => {
		const chosen = NEXT[theme]
		setTheme(chosen)
		stored.write(chosen)
		if (chosen === "auto") delete document.documentElement.dataset.theme
		else document.documentElement.dataset.theme = chosen
	}
	return [theme, next]
}
