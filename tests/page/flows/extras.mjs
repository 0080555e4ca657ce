// Styles, random choices, upscaling, sheets; the image on the whole screen; extending an image, and many at once.

export function flow({test, assert, api, ended, violations, shot}) {
	const prompt = page => page.getByLabel("Prompt", {exact: true})
	const stage = page => page.locator(".stage-image > img")
	const newest = async () => ended((await api("/v1/jobs?limit=1")).jobs[0].id)
	const square = page =>
		page.evaluate(async () => {
			const canvas = Object.assign(document.createElement("canvas"), {width: 64, height: 64})
			canvas.getContext("2d").fillRect(16, 16, 32, 32)
			const blob = await new Promise(resolve => canvas.toBlob(resolve))
			const transfer = new DataTransfer()
			transfer.items.add(new File([blob], "drawn.png", {type: "image/png"}))
			window.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}))
		})

	test("a style is saved, a sheet of choices is made, and both are restored", async page => {
		await page.goto("/#/generate?steps=2&width=64&height=64&seed=3")
		await prompt(page).fill("{prompt}, blue ink")
		await page.getByText("Styles, upscale, sheets").click()
		await page.getByText("ControlNet is not supported").waitFor()
		await page.getByText("Save or delete styles").click()
		await page.getByLabel("Save the prompt as a style").fill("ink <b>&</b>")
		await page.getByRole("button", {name: "Save style"}).click()
		await page.getByRole("button", {name: "ink <b>&</b>", exact: true}).click()
		await prompt(page).fill("a {red|green} apple")
		await page.getByLabel("Scale", {exact: true}).selectOption("2")
		assert.equal(await page.getByLabel("Upscale strength").first().inputValue(), "0", "the model has small images")
		await page.getByLabel("Columns").selectOption("seed")
		await page.getByLabel("Values").fill("1, 2, 3, 4")
		assert.deepEqual(await violations(page), [])
		await shot(page, "generate-extras")
		await page.keyboard.press("Control+Enter")
		await stage(page).waitFor()
		const job = await newest()
		assert.equal(job.result.images.length, 1)
		assert.deepEqual(job.result.images[0].grid, ["seed=1,2,3,4"])
		const {width, height, settings} = job.result.images[0]
		assert.ok(width > 4 * 128 && height > 128, "four images of twice the size")
		assert.deepEqual(settings.template, {
			prompt: "a {red|green} apple",
			negative_prompt: "",
			styles: ["ink <b>&</b>"]
		})
		await shot(page, "generate-sheet")

		await prompt(page).fill("something else")
		await page.getByLabel("Columns").selectOption("")
		await page.getByRole("button", {name: "ink <b>&</b>", exact: true}).click()
		await page.getByRole("button", {name: "Reuse settings"}).click()
		assert.equal(await prompt(page).inputValue(), "a {red|green} apple")
		assert.equal(await page.getByLabel("Columns").inputValue(), "seed")
		assert.equal(
			await page.getByRole("button", {name: "ink <b>&</b>", exact: true}).getAttribute("aria-pressed"),
			"true"
		)
		await page.getByRole("button", {name: "Delete the style ink <b>&</b>"}).click()
		await page.getByRole("button", {name: "Undo"}).click()
		await page.getByRole("button", {name: "Delete the style ink <b>&</b>"}).click()
		await page.getByRole("button", {name: "Delete the style ink <b>&</b>"}).waitFor({state: "detached"})
	})

	test("an image is looked at on the whole screen", async page => {
		await page.goto("/#/generate?steps=1&width=64&height=64")
		await prompt(page).fill("a pear")
		await page.keyboard.press("Control+Enter")
		await stage(page).waitFor()
		await page.getByRole("button", {name: "Full screen"}).click()
		const viewer = page.getByRole("dialog", {name: "Image, full screen"})
		await viewer.waitFor()
		await page.keyboard.press("+")
		await viewer.getByText("140%").waitFor()
		await page.mouse.move(640, 400)
		await page.mouse.wheel(0, -300)
		await page.waitForFunction(
			() => Number(document.querySelector(".stage-viewer .num").textContent.replace("%", "")) > 200
		)
		await page.keyboard.press("0")
		await viewer.getByText("100%").waitFor()
		assert.deepEqual(await violations(page), [])
		await shot(page, "generate-viewer")
		await page.keyboard.press("Escape")
		await viewer.waitFor({state: "detached"})
		const focused = await page.evaluate(() => document.activeElement.getAttribute("aria-label"))
		assert.equal(focused, "Full screen")
	})

	test(
		"an image is extended, and several are transformed at once",
		async page => {
			await page.goto("/#/edit?steps=1&seed=7&strength=1")
			await page.getByText("Choose an image to edit").waitFor()
			await square(page)
			await page.getByText("64 × 64 · no mask").waitFor()
			await prompt(page).fill("grass")
			await page.getByText("Extend the image").first().click()
			await page.getByLabel("Right", {exact: true}).fill("32")
			await page.getByRole("button", {name: "Extend the image"}).click()
			const larger = page.locator(".edit-larger")
			await larger.waitFor()
			assert.equal(await larger.getAttribute("width"), "96")
			await shot(page, "edit-extended")
			await page.getByLabel("Right", {exact: true}).fill("")
			await page.getByText("Many images").click()
			const content = await page.locator(".edit-larger").screenshot()
			const files = ["a.png", "b.png"].map(name => ({name, mimeType: "image/png", buffer: content}))
			const broken = {name: "c.png", mimeType: "image/png", buffer: Buffer.from("no image")}
			await page.locator("input[type=file][multiple]").setInputFiles([...files, broken])
			await page.getByText("2 images added to the queue").waitFor()
			await page.locator(".toast-error", {hasText: "c.png could not be added"}).waitFor()
			const {jobs} = await api("/v1/jobs?limit=2")
			const made = await Promise.all(jobs.map(job => ended(job.id)))
			assert.ok(
				made.every(job => job.operation === "image_transform" && job.state === "done" && !job.settings.outpaint)
			)
		},
		{expected: /400|415|422/}
	)

	test("reference images are added, ordered and sent to a model that reads them", async (page, _, note) => {
		const {models} = await api("/v1/capabilities")
		if (!models.some(each => each.name === "edit")) return note("this worker has no such model")
		const colored = color =>
			page.evaluate(async color => {
				const canvas = Object.assign(document.createElement("canvas"), {width: 96, height: 64})
				Object.assign(canvas.getContext("2d"), {fillStyle: color}).fillRect(0, 0, 96, 64)
				const blob = await new Promise(resolve => canvas.toBlob(resolve))
				return [...new Uint8Array(await blob.arrayBuffer())]
			}, color)
		await page.goto("/#/generate?steps=1&width=64&height=64&seed=3")
		await prompt(page).fill("a red apple")
		const references = page.getByRole("heading", {name: "Reference images"})
		assert.equal(await references.count(), 0, "the embedded model reads none")
		await page.getByLabel("Model", {exact: true}).selectOption("edit")
		await references.waitFor()
		const files = []
		for (const name of ["red", "blue"])
			files.push({name: `${name}.png`, mimeType: "image/png", buffer: Buffer.from(await colored(name))})
		await page.locator("section", {has: references}).locator("input[type=file]").setInputFiles(files)
		const images = page.locator(".reference img")
		await images.nth(1).waitFor()
		const before = await images.evaluateAll(all => all.map(each => each.getAttribute("src")))
		await page.getByRole("button", {name: "Move reference image 2 forward"}).click()
		await page.waitForFunction(
			first => document.querySelector(".reference img")?.getAttribute("src") === first,
			before[1]
		)
		assert.deepEqual(await violations(page), [])
		await shot(page, "generate-references")
		await page.reload()
		await images.nth(1).waitFor() // they are part of the form
		const jobs = sent => sent.method() === "POST" && new URL(sent.url()).pathname === "/v1/jobs"
		const [sent] = await Promise.all([page.waitForRequest(jobs), page.keyboard.press("Control+Enter")])
		await stage(page).waitFor()
		const job = await newest()
		assert.equal(job.state, "done", JSON.stringify(job.error))
		const ids = before.map(each => each.split("/")[3])
		assert.deepEqual(sent.postDataJSON().references, [ids[1], ids[0]])
		await page.getByRole("button", {name: "Remove reference image 1"}).click()
		await page.waitForFunction(() => document.querySelectorAll(".reference img").length === 1)
		await page.getByLabel("Model", {exact: true}).selectOption("inweave/emoji")
		await references.waitFor({state: "detached"})
		await page.keyboard.press("Control+Enter")
		for (let ends = job; ends.id === job.id; ) ends = await newest()
		assert.equal((await newest()).state, "done", "a model that reads none gets none")
	})
}
