// Drives the page in one browser: node tests/page/run.mjs ADDRESS [--core] [--only TEXT] [--shots FOLDER]
//
// A flow is a file in flows/ that exports `flow(tools)` and calls `tools.test(name, async (page) => ...)`. Each test gets a
// fresh context (no storage, no cookies), and a function for notes; an error that the page reports fails its test. Prints
// one JSON line per test.
// Two tests run at a time, one that generates images and one that does not; `{ alone: true }` is for those that change what
// other tests see. `{ core: true }` marks those that --core runs.
// Lines {"ask": "restart"} go to the parent process, which answers with one line when it is done.
import assert from "node:assert/strict"
import {mkdirSync, readdirSync, readFileSync} from "node:fs"
import {availableParallelism, loadavg} from "node:os"
import {createInterface} from "node:readline"
import {chromium} from "playwright-core"

const SWITCHES = [
	"--no-sandbox",
	"--disable-gpu",
	"--disable-quic",
	"--no-first-run",
	"--disable-background-networking",
	"--disable-component-update",
	"--disable-sync"
]
/** flows that generate images: one after the other, in parallel to those that only look at the page */
const MAKING = /^(compare|edit|extras|generate|queue|train):/
const [address, ...options] = process.argv.slice(2)
const option = name => (options.includes(name) ? options[options.indexOf(name) + 1] : undefined)
const only = option("--only")
const shots = option("--shots")
/** whether this machine is idle: only then are times meaningful */
const timed = loadavg()[0] < availableParallelism() / 2
if (shots) mkdirSync(shots, {recursive: true})

const answers = createInterface({input: process.stdin})[Symbol.asyncIterator]()
/** Ask the parent process to do something to the worker. */
async function ask(what) {
	console.log(JSON.stringify({ask: what}))
	return JSON.parse((await answers.next()).value ?? "null")
}

const axe = readFileSync(new URL("../../node_modules/axe-core/axe.min.js", import.meta.url), "utf8")
/** Violations of WCAG 2.2 AA as [rule, element] pairs. */
async function violations(page) {
	await page.evaluate(axe) // through the debugger: the page's own policy stays in force
	return page.evaluate(async () => {
		// colors are looked at when a change of scheme has arrived everywhere
		// (an inherited color passes through its transitions one element after the other)
		// those of scroll positions do not pass by themselves
		const ending = each => each.timeline === document.timeline && each.effect.getComputedTiming().endTime !== Infinity
		for (let still = 0; still < 5; still += 1) {
			await new Promise(requestAnimationFrame)
			if (document.getAnimations().some(ending)) still = 0
		}
		const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]
		const {violations} = await window.axe.run(document, {runOnly: {type: "tag", values: tags}})
		return violations.flatMap(({id, nodes}) =>
			nodes.map(node => `${id}: ${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`)
		)
	})
}

/** The JSON of a call to the worker's API. */
async function api(path, json, method) {
	const response = await fetch(address + path, {
		method: method ?? (json === undefined ? "GET" : "POST"),
		body: json === undefined ? undefined : JSON.stringify(json),
		headers: json === undefined ? {} : {"Content-Type": "application/json"}
	})
	return response.json()
}

async function submit(fields) {
	const small = {prompt: "a red apple", steps: 2, seed: 7, width: 64, height: 64}
	const answer = await api("/v1/jobs", {...small, ...fields})
	assert.ok(answer.id, `refused: ${JSON.stringify(answer)}`)
	return answer.id
}

async function ended(job) {
	for (;;) {
		const document = await api(`/v1/jobs/${job}`)
		if (["done", "failed", "cancelled"].includes(document.state)) return document
		await new Promise(resolve => setTimeout(resolve, 80))
	}
}

const browser = await chromium.launch({executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: SWITCHES})
const tests = []
for (const file of readdirSync(new URL("flows/", import.meta.url)).sort()) {
	if (!file.endsWith(".mjs")) continue
	const {flow} = await import(new URL(`flows/${file}`, import.meta.url))
	const test = (name, run, settings = {}) => tests.push({name: `${file.replace(".mjs", "")}: ${name}`, run, settings})
	flow({test, assert, address, api, submit, ended, ask, violations, browser, shot, timed})
}

/** A screenshot, if a folder was given. */
async function shot(page, name) {
	if (shots) await page.screenshot({path: `${shots}/${name}.png`})
}

let failures = 0
async function drive({name, run, settings}) {
	const started = Date.now()
	const reports = []
	const notes = []
	const context = await browser.newContext({
		viewport: {width: 1280, height: 800},
		baseURL: address,
		reducedMotion: "reduce", // nothing is looked at while it moves
		...settings.context
	})
	context.setDefaultTimeout(60_000)
	const watch = page => {
		page.on("pageerror", error => reports.push(String(error.stack ?? error)))
		page.on("dialog", dialog => {
			reports.push(`dialog: ${dialog.message()}`)
			dialog.dismiss()
		})
		page.on("console", message => {
			const expected = settings.expected?.test(message.text()) || /503 \(Service Unavailable\)/.test(message.text())
			if (message.type() === "error" && !expected) reports.push(`console: ${message.text()}`)
		})
	}
	context.on("page", watch)
	const page = await context.newPage()
	let error = null
	try {
		await run(page, context, text => notes.push(text))
		assert.deepEqual(reports, [], "the page reported errors")
	} catch (caught) {
		error = [String(caught.stack ?? caught), ...reports].join("\n")
		failures += 1
		if (shots) await page.screenshot({path: `${shots}/failed-${failures}.png`}).catch(() => {})
	}
	await context.close()
	console.log(JSON.stringify({name, error, notes, seconds: (Date.now() - started) / 1000}))
}

async function driveAll(list) {
	for (const each of list) await drive(each)
}

const core = options.includes("--core")
const chosen = tests.filter(({name, settings}) => (only ? name.includes(only) : !core || settings.core))
const together = chosen.filter(({settings}) => !settings.alone)
await Promise.all([
	driveAll(together.filter(({name}) => MAKING.test(name))),
	driveAll(together.filter(({name}) => !MAKING.test(name)))
])
await driveAll(chosen.filter(({settings}) => settings.alone))
await browser.close()
process.exit(failures ? 1 : 0)
