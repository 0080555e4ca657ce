// The frame: navigation, the view of the address, messages, the token form, the sheet of shortcuts.
import { cx, html, useEffect, useState } from "./lib/dom.js";
import { allowSingleKeys, keyNames, shortcuts, useShortcuts } from "./lib/keys.js";
import { href, navigate, useRoute } from "./lib/router.js";
import { lock, unlock } from "./lib/session.js";
import { app } from "./lib/state.js";
import { persisted, useStore } from "./lib/store.js";
import { t } from "./strings.js";
import { Button } from "./ui/button.js";
import { Dialog } from "./ui/dialog.js";
import { Empty } from "./ui/empty.js";
import { Check, Field } from "./ui/field.js";
import { Icon } from "./ui/icons.js";
import { showError, Toasts } from "./ui/toast.js";

/** The finished views, in the order of the navigation. Each module exports `View`, a component without props. */
const VIEWS = [
	{ name: "generate", load: () => import("./views/generate.js") },
	{ name: "compare", load: () => import("./views/compare.js") },
	{ name: "edit", load: () => import("./views/edit.js") },
	{ name: "library", load: () => import("./views/library.js") },
	{ name: "train", load: () => import("./views/train.js") },
	{ name: "queue", load: () => import("./views/queue.js") },
];
const titles = /** @type {Record<string, string>} */ (t.nav);

export function App() {
	const session = useStore(app, (state) => state.session);
	const { view: name } = useRoute();
	const current = VIEWS.find((view) => view.name === name) ?? VIEWS[0];
	const [sheet, setSheet] = useState(false);
	const [theme, nextTheme] = useTheme();
	useShortcuts([
		...VIEWS.map((view, index) => ({
			keys: String(index + 1),
			label: t.keys.view(titles[view.name]),
			group: t.keys.everywhere,
			run: () => navigate(view.name),
		})),
		{ keys: "t", label: t.keys.theme, group: t.keys.everywhere, run: nextTheme },
		{ keys: "?", label: t.keys.sheet, group: t.keys.everywhere, run: () => setSheet(true) },
	]);
	useEffect(() => {
		document.title = `${titles[current.name]} · ${t.app.name}`;
	}, [current]);
	if (session === "locked") return html`<${Lock} /><${Toasts} />`;
	return html`<div class="shell">
			<a class="skip" href="#view" onClick=${(/** @type {Event} */ event) => {
				event.preventDefault();
				document.getElementById("view")?.focus();
			}}>${t.app.skip}</a>
			<div class="rail">
				<a class="rail-mark" href=${href("generate")} aria-label=${t.app.name}><span class="mark"></span></a>
				<${Navigation} current=${current.name} />
				<div class="rail-foot">
					<${Button} kind="quiet" icon=${{ auto: "auto", light: "sun", dark: "moon" }[theme]} label=${t.app.theme[theme]} onClick=${nextTheme} />
					<${Button} kind="quiet" icon="help" label=${t.app.shortcuts} onClick=${() => setSheet(true)} />
					<${LockButton} />
				</div>
			</div>
			<div class="column">
				<${Notices} />
				<main class=${cx("view", `view-${current.name}`)} id="view" tabindex="-1"><${ViewOf} key=${current.name} view=${current} /></main>
			</div>
		</div>
		${sheet && html`<${Sheet} onClose=${() => setSheet(false)} />`}
		<${Toasts} />`;
}

/** @param {{ current: string }} props */
function Navigation({ current }) {
	const waiting = useStore(app, (state) => state.active?.length ?? 0);
	return html`<nav class="rail-nav" aria-label=${t.app.navigation}>
		${VIEWS.map(
			({
				name,
			}) => html`<a key=${name} class="rail-link" href=${href(name)} aria-current=${name === current ? "page" : undefined}>
				<${Icon} name=${name} />
				<span>${titles[name]}</span>
				${name === "queue" && waiting > 0 && html`<span class="rail-badge num">${waiting > 99 ? "99+" : waiting}</span>`}
			</a>`,
		)}
	</nav>`;
}

/** @param {{ view: { name: string, load: () => Promise<{ View: any }> } }} props */
function ViewOf({ view }) {
	const [loaded, setLoaded] = useState(/** @type {{ View?: any, failed?: boolean }} */ ({}));
	const known = useStore(app, (state) => Boolean(state.loras && state.capabilities && state.ended));
	const [waited, setWaited] = useState(false);
	useEffect(() => {
		view.load().then(
			({ View }) => setLoaded({ View }),
			() => setLoaded({ failed: true }),
		);
	}, [view]);
	// what the worker tells arrives before the view is drawn, so that nothing in it moves afterwards; or it is drawn without
	useEffect(() => {
		const timer = setTimeout(() => setWaited(true), 1500);
		return () => clearTimeout(timer);
	}, []);
	if (loaded.failed) {
		return html`<${Empty} name="failed" title=${t.app.viewFailed}><${Button} kind="primary" onClick=${() => location.reload()}>${t.app.reload}<//><//>`;
	}
	return loaded.View && (known || waited) ? html`<${loaded.View} />` : null;
}

function Notices() {
	const online = useStore(app, (state) => state.online);
	const notReady = useStore(app, (state) => state.notReady);
	return html`<div class="notices" role="status">
		${
			!online
				? html`<div class="notice-strip"><${Icon} name="warning" />${t.app.offline}</div>`
				: notReady !== null && html`<div class="notice-strip"><${Icon} name="info" />${t.app.notReady(notReady)}</div>`
		}
	</div>`;
}

function LockButton() {
	const tokenRequired = useStore(app, (state) => state.tokenRequired);
	return (
		tokenRequired &&
		html`<${Button} kind="quiet" icon="lock" label=${t.app.lock} onClick=${() => lock().catch(showError)} />`
	);
}

function Lock() {
	const [token, setToken] = useState("");
	const [wrong, setWrong] = useState(false);
	const [busy, setBusy] = useState(false);
	/** @param {Event} event */
	const submit = async (event) => {
		event.preventDefault();
		setBusy(true);
		try {
			await unlock(token.trim());
		} catch (/** @type {any} */ error) {
			setWrong(error.status === 401);
			showError(error);
		}
		setBusy(false);
	};
	return html`<main class="lock">
		<form class="lock-card" onSubmit=${submit}>
			<span class="mark"></span>
			<div>
				<h1>${t.session.title}</h1>
				<p class="muted">${t.session.text}</p>
			</div>
			<${Field} label=${t.session.token}>
				${(/** @type {string} */ id) => html`<input
					id=${id}
					class="input"
					type="password"
					autocomplete="current-password"
					autofocus
					required
					value=${token}
					aria-invalid=${wrong ? "true" : undefined}
					aria-describedby="token-wrong"
					onInput=${(/** @type {any} */ e) => setToken(e.currentTarget.value)}
				/>`}
			<//>
			<p id="token-wrong" class="field-error" role="alert">${wrong ? t.session.wrong : ""}</p>
			<${Button} kind="primary" size="large" type="submit" busy=${busy}>${t.session.open}<//>
		</form>
	</main>`;
}

/** @param {{ onClose: () => void }} props */
function Sheet({ onClose }) {
	const list = useStore(shortcuts, (state) => state.list);
	const singleKeys = useStore(shortcuts, (state) => state.singleKeys);
	const groups = Map.groupBy(list, (each) => each.group);
	return html`<${Dialog} title=${t.keys.title} onClose=${onClose} wide>
		<div class="keysheet">
			${[...groups].reverse().map(
				([group, entries]) => html`<section key=${group}>
					<h3>${group}</h3>
					<dl>
						${entries.map(
							(each) => html`<div>
								<dt>${each.label}</dt>
								<dd>${keyNames(each.keys).map((key) => html`<kbd>${key}</kbd>`)}</dd>
							</div>`,
						)}
					</dl>
				</section>`,
			)}
		</div>
		<div>
			<${Check} label=${t.keys.single} checked=${singleKeys} onChange=${allowSingleKeys} />
			<p class="field-hint">${t.keys.singleHint}</p>
		</div>
	<//>`;
}

const themeStore = persisted("theme-choice", /** @type {"auto" | "light" | "dark"} */ ("auto"));

/** @returns {["auto" | "light" | "dark", () => void]} */
function useTheme() {
	const [theme, setTheme] = useState(themeStore.read());
	const next = () => {
		const chosen = /** @type {const} */ ({ auto: "light", light: "dark", dark: "auto" })[theme];
		setTheme(chosen);
		themeStore.write(chosen);
		if (chosen === "auto") {
			localStorage.removeItem("inweave.theme");
			delete document.documentElement.dataset.theme;
		} else {
			localStorage.setItem("inweave.theme", chosen); // theme.js reads it before the first paint
			document.documentElement.dataset.theme = chosen;
		}
	};
	return [theme, next];
}
