// Opens the session, draws the page, and keeps the state up to date.
import {App} from "./app.js"
import {app, html, loadCapabilities, loadLoras, loadReadiness, refreshJobs, render, watchJobs} from "./kit.js"
import {openSession} from "./lib/session.js"

const root = /** @type {HTMLElement} */ (document.getElementById("app"))
root.replaceChildren()
render(html`<${App} />`, root)

/** Also after a restart or a new token. */
async function load() {
	refreshJobs()
	await Promise.all([loadCapabilities(), loadLoras(), loadReadiness()]).catch(() => {})
}

let known = {session: app.get().session, online: app.get().online}
app.subscribe(() => {
	const {session, online} = app.get()
	const reopened = session === "open" && (known.session !== "open" || (online && !known.online))
	known = {session, online}
	if (reopened) load()
})

openSession()
watchJobs()
