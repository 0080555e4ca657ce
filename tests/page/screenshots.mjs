// Screenshots of the page: node tests/page/screenshots.mjs ADDRESS FOLDER [--all]
//
// Those of the documentation, or with --all every view and state on a phone, two desktops and a 4K screen, in light and dark.
// --only TEXT: views whose name contains the text.
import {chromium} from "playwright-core"

const [address, folder, ...options] = process.argv.slice(2)
const all = options.includes("--all")
const only = options.includes("--only") ? options[options.indexOf("--only") + 1] : ""
const PROMPTS = ["smiling fox", "red apple", "castle", "cup of tea", "cactus", "cat face", "sunflower", "pizza"]
const STYLES = ["", " <lora:pixel:0.9>", " <lora:ink:0.8>"]

async function call(path, json) {
	const response = await fetch(address + path, {
		method: "POST",
		body: JSON.stringify(json),
		headers: {"Content-Type": "application/json"}
	})
	return response.json()
}

async function made(request) {
	const {id} = await call("/v1/jobs", request.operation ? request : {steps: 12, ...request})
	for (;;) {
		const job = await (await fetch(`${address}/v1/jobs/${id}`)).json()
		if (["done", "failed", "cancelled"].includes(job.state)) return job
		await new Promise(resolve => setTimeout(resolve, 100))
	}
}

const DATASET = "inweave/pixel"
let run = ""
/** A run of the example, made once. */
async function trained() {
	const settings = {steps: 60, rank: 4, batch_size: 2, log_every: 1, save_every: 15, sample_every: 10}
	const prompts = ["cat face", "red apple"].map(prompt => `${prompt}, pixel art --s 8`)
	run ||= (
		await made({
			operation: "train",
			name: "my-pixel",
			dataset: DATASET,
			settings: {...settings, sample_prompts: prompts}
		})
	).id
	return run
}

const jobs = []
for (const [index, prompt] of [...PROMPTS].reverse().entries())
	jobs.push(await made({prompt: prompt + STYLES[index % 3], seed: 11 + index}))
const fox = jobs.at(-1)

const browser = await chromium.launch({
	executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium",
	args: ["--no-sandbox", "--disable-gpu"]
})

/** Open a view, bring it to an interesting state, and take a screenshot. */
const VIEWS = {
	generate: async page => {
		await page.goto(`/#/generate?prompt=${encodeURIComponent("smiling fox <lora:pixel:0.9>")}&seed=18`)
		await page.locator(".gallery-item img").nth(4).waitFor()
	},
	compare: async page => {
		const loras = encodeURIComponent(JSON.stringify([{name: "pixel", strength: 1}]))
		await page.goto(`/#/compare?prompt=cat+face&seed=5&steps=12&loras=${loras}`)
		await page.getByRole("button", {name: "Compare", exact: true}).click()
		await page.locator(".beforeafter img").nth(1).waitFor()
		await page.locator(".compare [role=progressbar]").waitFor({state: "detached"})
	},
	edit: async page => {
		await page.goto(`/#/edit?job=${fox.id}&image=0&prompt=smiling+fox&feather=6`)
		await page.getByText("no mask").waitFor()
		const box = await page.locator(".edit-frame").boundingBox()
		const side = Math.min(box.width, box.height) - 24
		const at = (x, y) => [box.x + box.width / 2 + (x - 0.5) * side, box.y + box.height / 2 + (y - 0.5) * side]
		await page.getByLabel("Brush size").first().fill("22")
		await page.mouse.move(...at(0.25, 0.75))
		await page.mouse.down()
		for (const [x, y] of [
			[0.4, 0.85],
			[0.6, 0.85],
			[0.75, 0.72]
		])
			await page.mouse.move(...at(x, y), {steps: 5})
		await page.mouse.up()
		await page.mouse.move(...at(0.3, 0.3))
	},
	"edit-result": async page => {
		await VIEWS.edit(page)
		await page.getByLabel("Prompt", {exact: true}).fill("tiger")
		await page.getByRole("button", {name: "Inpaint the mask"}).click()
		await page.locator(".beforeafter img").nth(1).waitFor()
	},
	"generate-open": async page => {
		const {loras} = await (await fetch(`${address}/v1/loras`)).json()
		const tags = loras.slice(0, 3).map(lora => `<lora:${lora.name}:0.8>`)
		await page.goto(`/#/generate?negative_prompt=blur&steps=8&prompt=${encodeURIComponent(`a fox ${tags.join(" ")}`)}`)
		await page.locator(".lora-item").first().waitFor()
		await openAll(page)
		await page.getByLabel("Schedule").scrollIntoViewIfNeeded()
	},
	"edit-start": page => page.goto("/#/edit"),
	gallery: async page => {
		await page.goto("/#/gallery")
		await page.locator(".gallery-tile").nth(7).waitFor()
		for (const index of [0, 2]) await page.locator(".gallery-tile").nth(index).getByRole("checkbox").click()
		await page.getByText("2 selected").waitFor()
	},
	"gallery-viewer": async page => {
		await page.goto("/#/gallery?q=fox")
		await page.locator(".gallery-item").first().click()
		await page
			.locator("dt", {hasText: /^Steps$/})
			.or(page.locator(".gallery-viewer-image"))
			.first()
			.waitFor()
	},
	library: async page => {
		await page.goto("/#/library")
		await page.getByRole("link", {name: /pixel/}).waitFor()
	},
	"library-details": async page => {
		await VIEWS.library(page)
		await page.getByRole("link", {name: /pixel/}).click()
		await page.getByRole("button", {name: "Check"}).click()
		await page.getByText(/tensors have a place/).waitFor()
	},
	"library-table": async page => {
		await page.goto("/#/library?layout=table")
		await page.getByRole("columnheader", {name: "AutoV2"}).waitFor()
	},
	"library-sample": async page => {
		await page.goto("/#/library?query=ink")
		await page.getByRole("link", {name: /^ink/}).click()
		const dialog = page.getByRole("dialog")
		const made = dialog.locator(".beforeafter img").first()
		const button = dialog.getByRole("button", {name: "Make sample images"})
		await made.or(button).first().waitFor()
		if (await button.count()) await button.click()
		await made.waitFor()
		await made.scrollIntoViewIfNeeded()
	},
	train: async page => {
		await page.goto("/#/train")
		await page.locator(".train-dataset img").first().waitFor()
	},
	"train-desk": async page => {
		await page.goto(`/#/train?dataset=${encodeURIComponent(DATASET)}`)
		await page.locator(".train-window").nth(5).waitFor()
		await page.getByText("Ready to start.").waitFor()
	},
	"train-captions": async page => {
		const {id} = await call("/v1/datasets", {name: "An example with captions"})
		const {pictures} = await (await fetch(`${address}/v1/datasets/${DATASET}`)).json()
		for (const {name} of pictures.slice(0, 8)) {
			const image = await fetch(`${address}/v1/datasets/${DATASET}/pictures/${encodeURIComponent(name)}`)
			await fetch(`${address}/v1/datasets/${id}/pictures/${encodeURIComponent(name)}`, {
				method: "PUT",
				body: await image.arrayBuffer()
			})
		}
		await page.goto(`/#/train?dataset=${id}`)
		await page.locator(".train-window").nth(5).waitFor()
		await openAll(page)
		await page.getByLabel("Prepend to every caption").fill("a drawing of")
		await page
			.getByText(/Ready to start|problem/)
			.first()
			.waitFor()
	},
	"train-run": async page => {
		await page.goto(`/#/train?job=${await trained()}`)
		await page
			.getByRole("img", {name: /after step/})
			.nth(1)
			.waitFor()
	},
	queue: async page => {
		await call("/v1/queue", {paused: true})
		for (const prompt of PROMPTS.slice(0, 3)) await call("/v1/jobs", {prompt, steps: 1, width: 64, height: 64})
		await page.goto("/#/queue")
		await page.locator(".queue-title").nth(2).waitFor()
	}
}

async function openAll(page) {
	await page.evaluate(() => {
		for (const each of document.querySelectorAll("main details")) each.open = true
	})
}

async function take(view, name, width, height, colorScheme) {
	const context = await browser.newContext({
		viewport: {width, height},
		baseURL: address,
		colorScheme,
		reducedMotion: "reduce"
	})
	context.setDefaultTimeout(180_000)
	const page = await context.newPage()
	await VIEWS[view](page)
	await page.waitForFunction(() => [...document.images].every(each => each.complete || each.loading === "lazy"))
	await page.waitForTimeout(400) // what was asked for last is drawn
	await page.screenshot({path: `${folder}/${name}.png`})
	await context.close()
	if (view === "queue") {
		for (const job of (await (await fetch(`${address}/v1/jobs?state=queued`)).json()).jobs)
			await fetch(`${address}/v1/jobs/${job.id}`, {method: "DELETE"})
		await call("/v1/queue", {paused: false})
	}
}

if (all) {
	for (const view of Object.keys(VIEWS).filter(each => each.includes(only)))
		for (const [size, width, height] of [
			["phone", 390, 844],
			["small", 1280, 720],
			["desktop", 1440, 900],
			["4k", 3840, 2160]
		])
			for (const scheme of ["light", "dark"]) await take(view, `${view}-${size}-${scheme}`, width, height, scheme)
} else {
	await take("generate", "page-generate", 1280, 800, "light")
	await take("compare", "page-compare", 1280, 800, "dark")
	await take("edit", "page-edit", 1280, 800, "light")
	await take("gallery", "page-gallery", 1280, 800, "light")
	await take("library-details", "page-library", 1280, 800, "light")
	await take("train-desk", "page-train", 1280, 800, "light")
	await take("train-run", "page-run", 1280, 800, "dark")
	await take("generate", "page-phone", 360, 740, "dark")
}
await browser.close()
