// Generate: form, cards, live preview, gallery, settings of images, restarts and tabs.

export function flow({test, assert, api, submit, ended, ask, address, shot}) {
	const prompt = page => page.getByLabel("Prompt", {exact: true})
	const card = (page, name) => page.locator(".lora-card", {hasText: name})

	test(
		"an image is generated, kept, reused and deleted",
		async page => {
			await page.goto("/#/generate?steps=6&width=64&height=64")
			await prompt(page).fill("a red apple")
			await card(page, "pixel").click()
			assert.equal(await prompt(page).inputValue(), "a red apple <lora:pixel:1>")
			await page.getByLabel("Strength of pixel").first().fill("0.4")
			assert.equal(await prompt(page).inputValue(), "a red apple <lora:pixel:0.4>")
			await page.getByLabel("Seed", {exact: true}).fill("11")
			// both are gone once the image is done: the page itself records them, however late this script looks
			const passing = ["[role=progressbar]", "img[alt^='Preview of the image']"]
			const seen = await page.evaluateHandle(selectors => {
				const found = new Set()
				new MutationObserver(() => {
					for (const each of selectors) if (document.querySelector(each)) found.add(each)
				}).observe(document.body, {subtree: true, childList: true, attributes: true})
				return found
			}, passing)
			await page.keyboard.press("Control+Enter")
			await page.waitForFunction(found => found.size === 2, seen)
			await shot(page, "generate-running")
			const image = page.locator(".stage img[alt='a red apple <lora:pixel:0.4>, seed 11']")
			await image.waitFor()
			await page.getByText("changed 100 of 145 layers").waitFor()
			await shot(page, "generate-done")

			await page.reload()
			await image.waitFor()
			await prompt(page).fill("something else")
			await page.getByRole("button", {name: "Reuse settings"}).click()
			assert.equal(await prompt(page).inputValue(), "a red apple <lora:pixel:0.4>")
			assert.equal(await page.getByLabel("Seed", {exact: true}).inputValue(), "11")

			const [download] = await Promise.all([
				page.waitForEvent("download"),
				page.getByRole("link", {name: "Download"}).click()
			])
			assert.match(download.suggestedFilename(), /^11-a-red-apple.*\.png$/)
			await page.getByRole("button", {name: "Delete", exact: true}).click()
			await image.waitFor({state: "detached"})
			await page.getByRole("button", {name: "Undo"}).click()
			await image.waitFor()
			await page.getByRole("button", {name: "Delete", exact: true}).click()
			await image.waitFor({state: "detached"})
		},
		{core: true}
	)

	test("an image outlives its job, with its settings, Compare and Edit", async page => {
		const job = await ended(await submit({prompt: "a pear <lora:ink:0.3>", seed: 21, steps: 4}))
		await api(`/v1/jobs/${job.id}?forget=true`, undefined, "DELETE")
		await page.goto("/#/generate?prompt=x")
		const open = async () => {
			await page.goto("/#/generate")
			await page.locator(".gallery-item img[alt='a pear <lora:ink:0.3>, seed 21']").click()
			await page.locator(".stage img[alt='a pear <lora:ink:0.3>, seed 21']").waitFor()
		}
		await open()
		await page.getByText("Generation details").click()
		await page.locator(".facts dd", {hasText: /^4$/}).waitFor() // its steps, from the file
		await page.getByRole("button", {name: "Reuse settings"}).click()
		await page.getByText("Image settings loaded").waitFor()
		assert.equal(await prompt(page).inputValue(), "a pear <lora:ink:0.3>")
		assert.equal(await page.getByLabel("Steps").inputValue(), "4")
		await page.getByRole("button", {name: "Compare", exact: true}).click()
		await page.waitForURL(/#\/compare/)
		await page.locator(".compare-lora").waitFor()
		assert.match(page.url(), /seed=21/)
		await open()
		await page.getByRole("link", {name: "Edit", exact: true}).last().click()
		await page.locator(".edit-frame").waitFor()
		assert.match(page.url(), /gallery=image-/)
		await page.waitForFunction(() => document.querySelector("textarea")?.value === "a pear <lora:ink:0.3>")
	})

	test(
		"tags, cards, sliders and words stay in step",
		async page => {
			await page.goto(`/#/generate?prompt=${encodeURIComponent("a fox <lora:pixel:0.5> <lora:ink:0.2>")}`)
			await page.getByLabel("Strength of ink").first().waitFor()
			assert.equal(await card(page, "pixel").getAttribute("aria-pressed"), "true")
			await page.getByRole("button", {name: "Move pixel: drag, or press the up and down arrow keys"}).press("ArrowDown")
			assert.equal(await prompt(page).inputValue(), "a fox <lora:ink:0.2> <lora:pixel:0.5>")
			await page.locator(".grip").nth(1).dragTo(page.locator(".lora-item").nth(0))
			assert.equal(await prompt(page).inputValue(), "a fox <lora:pixel:0.5> <lora:ink:0.2>")
			await page.getByRole("button", {name: "Per-component strengths of pixel"}).click()
			await page.getByLabel("Text encoder").first().fill("1.5")
			assert.equal(await prompt(page).inputValue(), "a fox <lora:pixel:te=1.5,unet=0.5> <lora:ink:0.2>")
			// tags of its dataset are no trigger words
			await page.getByText("Tags of the training images").click()
			await page.getByRole("button", {name: "cactus", exact: true}).click()
			assert.equal(await prompt(page).inputValue(), "a fox, cactus <lora:pixel:te=1.5,unet=0.5> <lora:ink:0.2>")
			await page.getByRole("button", {name: "cactus", exact: true}).click()
			await page.getByRole("button", {name: "Remove ink"}).click()
			assert.equal(await prompt(page).inputValue(), "a fox <lora:pixel:te=1.5,unet=0.5>")
			await prompt(page).fill("a fox <lora:nosuch:1>")
			await page.getByText("not in the library").waitFor()
			await page.waitForFunction(() =>
				decodeURIComponent(location.hash.replaceAll("+", " ")).includes("<lora:nosuch:1>")
			)
			await page.keyboard.press("Control+Enter")
			await page.locator(".toast-error", {hasText: "LoRA nosuch"}).waitFor()
		},
		{expected: /404/}
	)

	test(
		"a finger puts LoRAs in order",
		async (page, context) => {
			await page.goto(`/#/generate?prompt=${encodeURIComponent("a fox <lora:pixel:0.5> <lora:ink:0.2>")}`)
			await page.getByLabel("Strength of ink").first().waitFor()
			await page.locator(".grip").nth(0).scrollIntoViewIfNeeded()
			const middle = async selector => {
				const {x, y, width, height} = await page.locator(selector).boundingBox()
				return {x: x + width / 2, y: y + height / 2}
			}
			const client = await context.newCDPSession(page)
			const touch = (type, ...touchPoints) => client.send("Input.dispatchTouchEvent", {type, touchPoints})
			const [from, to] = [await middle(".grip >> nth=0"), await middle(".lora-item >> nth=1")]
			await touch("touchStart", from)
			await touch("touchMove", to)
			await page.locator(".lora-item[data-drag=to]").waitFor()
			await touch("touchEnd")
			await page.waitForFunction(
				() => document.querySelector("textarea").value === "a fox <lora:ink:0.2> <lora:pixel:0.5>"
			)
		},
		{context: {hasTouch: true, viewport: {width: 360, height: 740}}}
	)

	test("hostile names and metadata are text, and can be used", async page => {
		const attacks = () => page.locator("img[src=x], b[onclick], main script, dialog script").count()
		await page.goto("/#/generate")
		const name = "<img src=x onerror=alert(1)>"
		await card(page, name).click()
		assert.match(await prompt(page).inputValue(), /^<lora:lora-[0-9a-f]{16}:1>$/) // its name cannot stand in a tag
		await page.locator(".lora-item", {hasText: name}).waitFor()
		assert.equal(await attacks(), 0)
		await page.goto("/#/library?query=202e") // what turns a name around is written out, and found
		await page.getByText("\\u202egnp.x").first().waitFor()
		assert.ok(!(await page.evaluate(() => document.body.textContent.includes("\u202e"))))
		await page.goto("/#/library?query=onclick")
		await page.getByRole("link", {name: /^metadata/}).click()
		const details = page.getByRole("dialog", {name: "metadata"})
		await details.getByRole("button", {name: "<b onclick=alert(6)>word</b>"}).waitFor()
		await details.getByText("Metadata (5)").click()
		await details.getByText("<img src=x onerror=alert(4)>").first().waitFor()
		await details.getByText("<script>alert(5)</script>").first().waitFor()
		await details.getByText("<i>key</i>").waitFor()
		assert.equal(await attacks(), 0)
		await details.getByRole("button", {name: "Use in prompt"}).click()
		await page.waitForFunction(() => document.querySelector("textarea")?.value === "<lora:metadata:1>")
		await page.getByRole("button", {name: "<b onclick=alert(6)>word</b>"}).click()
		// nothing in the metadata of a file adds a LoRA by a click
		assert.equal(await prompt(page).inputValue(), "<b onclick=alert(6)>word</b> <lora:metadata:1>")
		assert.equal(await page.getByRole("group", {name: "Trigger words of these LoRAs"}).getByRole("button").count(), 2)
		await page.getByRole("button", {name: "soft edges"}).waitFor()
		assert.equal(await attacks(), 0)
	})

	test(
		"a dropped image restores its settings and names what is missing",
		async page => {
			const job = await ended(
				await submit({prompt: "a cup <lora:ink:0.3>", seed: 5, steps: 2, negative_prompt: "blur"})
			)
			const bytes = await (await fetch(address + job.result.images[0].url)).arrayBuffer()
			const drop = content =>
				page.evaluate(
					data => {
						const transfer = new DataTransfer()
						transfer.items.add(new File([new Uint8Array(data)], "image.png", {type: "image/png"}))
						window.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}))
					},
					[...new Uint8Array(content)]
				)
			await page.goto("/#/generate")
			await card(page, "ink").first().waitFor()
			await drop(bytes)
			await page.getByText("Image settings loaded").waitFor()
			assert.equal(await prompt(page).inputValue(), "a cup <lora:ink:0.3>")
			assert.equal(await page.getByLabel("Negative prompt").inputValue(), "blur")
			assert.equal(await page.getByLabel("Steps").inputValue(), "2")
			await drop(await (await fetch(`${address}/page/-/icons/mark.svg`)).arrayBuffer())
			await page.locator(".toast-error").waitFor()
		},
		{expected: /400/}
	)

	test("LoRAs of another base are hidden, counted, and shown on demand", async page => {
		await page.route("**/v1/loras?*", async route => {
			const answer = await (await route.fetch()).json()
			answer.loras.push(
				{...answer.loras[0], id: "lora-1", name: "for-sdxl", display_name: "for-sdxl", base: "sdxl"},
				{...answer.loras[0], id: "lora-2", name: "broken", display_name: "broken", error: "it is cut short"}
			)
			await route.fulfill({json: answer})
		})
		await page.goto("/#/generate")
		await page.getByText("2 hidden: 1 made for sdxl, 1 unreadable.").waitFor()
		assert.equal(await card(page, "for-sdxl").count(), 0)
		await page.getByRole("button", {name: "Show all"}).click()
		await card(page, "for-sdxl").waitFor()
		await page.getByRole("searchbox").fill("pix")
		await card(page, "for-sdxl").waitFor({state: "detached"})
	})

	test(
		"a reload rejoins the stream, a second tab sees it, and the worker may restart",
		async (page, context) => {
			// so many steps that it is never done before it is cancelled
			const job = await submit({prompt: "a castle", steps: 150, count: 6, width: 256, height: 256, preview_every: 4})
			await page.goto("/#/generate")
			await page
				.locator(`.stage[data-job=${job}]`)
				.getByText(/Step \d+ of 900/)
				.waitFor()
			await page.reload()
			await page
				.locator(`.stage[data-job=${job}]`)
				.getByText(/Step \d+ of 900/)
				.waitFor()
			const second = await context.newPage()
			await second.goto("/#/queue")
			await second
				.locator(`[data-job=${job}]`)
				.getByText(/Step \d+ of 900/)
				.waitFor()
			await ask("restart")
			await page
				.locator(`.stage[data-job=${job}]`)
				.getByText(/Step \d+ of 900/)
				.waitFor()
			await second.getByRole("button", {name: "Cancel a castle"}).click()
			await page.locator(`.stage[data-job=${job}] [role=progressbar]`).waitFor({state: "detached"})
			assert.equal((await api(`/v1/jobs/${job}`)).state, "cancelled")
		},
		{alone: true, expected: /ERR_CONNECTION|ERR_INCOMPLETE|ERR_EMPTY|Failed to load resource/}
	)
}
