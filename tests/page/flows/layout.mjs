// Nothing hides: in every view, at every size and with long names, what can be operated can be reached.
import {readFileSync} from "node:fs"

const PIXEL = new URL("../../../src/inweave/models/emoji/loras/pixel.safetensors", import.meta.url)
const SIZES = [
	[1280, 720],
	[1440, 900],
	[390, 844],
	[3840, 2160]
]
const NAMES = Array.from({length: 20}, (_, index) =>
	index % 2
		? `TheLongNameOfACharacterWithoutAnySpaceOrDashThatBreaks${index}`
		: `detailed watercolor illustration style with soft edges v1.5 epoch-${index} fp16 pruned`
)

/** What cannot be operated: controls whose middle belongs to something else after scrolling to them, or outside the window. */
const hidden = () => {
	const wrong = []
	if (document.documentElement.scrollWidth > innerWidth)
		wrong.push(`${document.documentElement.scrollWidth} pixels wide`)
	const root = document.querySelector("dialog[open]") ?? document.body
	for (const each of root.querySelectorAll("button, a[href], input, select, textarea, summary")) {
		if (!each.checkVisibility({visibilityProperty: true}) || each.closest(".visually-hidden, .skip")) continue
		each.scrollIntoView({block: "center", inline: "center", behavior: "instant"})
		const [box] = each.getClientRects()
		if (!box?.width) continue
		const at = document.elementFromPoint(
			Math.min(Math.max(box.x + box.width / 2, 1), innerWidth - 2),
			box.y + Math.min(box.height / 2, 30)
		)
		const label = each.closest("label")
		const reached = at && (each.contains(at) || label?.contains(at) || at.closest("label")?.contains(each))
		const name = each.outerHTML.slice(0, 120)
		if (!reached) wrong.push(`${name} is behind ${at?.outerHTML.slice(0, 80)}`)
		else if (box.left < -1 || box.right > innerWidth + 1) wrong.push(`${name} leaves the window`)
	}
	return wrong
}

export function flow({test, assert, api, address, shot}) {
	test(
		"nothing hides with twenty long names and all sections open",
		async page => {
			const ids = []
			for (const name of NAMES) {
				const body = readFileSync(PIXEL)
				const answer = await fetch(`${address}/v1/loras?name=${encodeURIComponent(name)}`, {method: "POST", body})
				ids.push((await answer.json()).id)
			}
			const tags = NAMES.slice(0, 4).map(name => `<lora:${name}:0.8>`)
			const chosen = JSON.stringify(NAMES.slice(0, 2).map(name => ({name, strength: 1})))
			const views = {
				generate: `generate?steps=4&prompt=${encodeURIComponent(`a fox ${tags.join(" ")}`)}`,
				compare: `compare?prompt=cat&loras=${encodeURIComponent(chosen)}`,
				edit: "edit",
				gallery: "gallery",
				library: "library",
				table: "library?layout=table",
				details: `library?lora=${ids[0]}`,
				train: "train",
				desk: "train?dataset=inweave%2Fpixel",
				queue: "queue"
			}
			try {
				for (const [name, place] of Object.entries(views)) {
					await page.goto(`/#/${place}`)
					await page.locator("main > *").first().waitFor()
					if (["generate", "library"].includes(name)) await page.getByText(NAMES[0].slice(0, 14)).first().waitFor()
					if (name === "details") await page.getByRole("dialog").getByText("Hashes").waitFor()
					if (name === "desk") await page.getByRole("button", {name: /Start training|Check again/}).waitFor()
					await page.evaluate(() => {
						for (const each of document.querySelectorAll("details")) each.open = true
					})
					for (const [width, height] of SIZES) {
						await page.setViewportSize({width, height})
						await page.waitForFunction(most => innerWidth === most, width)
						await page.evaluate(async () => {
							for (let frame = 0; frame < 5; frame += 1) await new Promise(requestAnimationFrame)
						})
						assert.deepEqual(await page.evaluate(hidden), [], `${name}, ${width} x ${height}`)
						await page.evaluate(() => {
							for (const each of document.querySelectorAll("*")) if (each.scrollTop) each.scrollTop = 0
						})
						await shot(page, `layout-${name}-${width}`)
						// what one came for is in sight at once
						const main = {generate: "Generate", desk: /Start training|Check again/}[name]
						if (main && width > 1000) {
							const box = await page.getByRole("button", {name: main, exact: true}).last().boundingBox()
							assert.ok(box.y + box.height <= height, `${name}: its button ends at ${box.y + box.height} of ${height}`)
						}
					}
				}
			} finally {
				for (const id of ids) await api(`/v1/loras/${id}`, undefined, "DELETE")
			}
		},
		{alone: true}
	)
}
