// Compare: with and without, sweeps and sheets, always the same seed.
export function flow({test, assert, api, submit, ended, violations, shot, timed}) {
	const query = "prompt=a+red+apple&seed=7&steps=1&width=64&height=64"
	const loras = encodeURIComponent(JSON.stringify([{name: "pixel", strength: 1}]))

	test(
		"with and without, and a strength that redraws",
		async page => {
			await page.goto(`/#/compare?${query}&loras=${loras}`)
			await page.getByRole("button", {name: "Compare", exact: true}).click()
			const images = page.locator(".beforeafter img")
			await images.nth(1).waitFor()
			await page.waitForFunction(() =>
				[...document.querySelectorAll(".beforeafter img")].every(each => each.complete && each.naturalWidth)
			)
			const [after, before] = await images.evaluateAll(list => list.map(each => each.getAttribute("src")))
			const job = src => api(`/v1/jobs/${src.split("/")[3]}`)
			const [made, plain] = [await job(after), await job(before)]
			assert.deepEqual([made.settings.seed, plain.settings.seed], [7, 7])
			assert.deepEqual([made.result.loras.map(each => each.name), plain.result.loras ?? []], [["pixel"], []])
			const handle = page.getByLabel("Before/after slider")
			await handle.focus()
			await page.keyboard.press("ArrowLeft")
			assert.equal(await handle.inputValue(), "49")
			for (const scheme of ["light", "dark"]) {
				await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
				if (scheme === "light") assert.deepEqual(await violations(page), [])
				await shot(page, `compare-slider-${scheme}`)
			}
			await page.getByRole("slider", {name: "Strength of pixel"}).focus()
			await page.keyboard.press("ArrowLeft")
			await page.waitForFunction(old => document.querySelector(".beforeafter img")?.getAttribute("src") !== old, after)
			assert.equal(await images.nth(1).getAttribute("src"), before) // the image without is kept
			const redrawn = await job(await images.nth(0).getAttribute("src"))
			assert.equal(redrawn.result.loras[0].unet, 0.95)
		},
		{core: true}
	)

	test(
		"moving a strength redraws within two seconds",
		async (page, _, note) => {
			// as the model draws by default: its own size and its own steps
			await page.goto(`/#/compare?prompt=cat+face&seed=7&loras=${loras}`)
			await page.getByRole("button", {name: "Compare", exact: true}).click()
			const image = page.locator(".beforeafter img").first()
			await image.waitFor()
			const slider = page.getByRole("slider", {name: "Strength of pixel"})
			await slider.focus()
			/** The address of the newest image once it has changed: a draft, or the image when nothing is left to generate. */
			const next = async (old, final) => {
				await page.waitForFunction(
					([src, last]) => {
						const image = document.querySelector(".beforeafter img")
						const busy = document.querySelector(".compare [role=progressbar]")
						return image.getAttribute("src") !== src && !(last && busy) && image.complete && image.naturalWidth > 0
					},
					[old, final]
				)
				return image.getAttribute("src")
			}
			const job = src => api(`/v1/jobs/${src.split("/")[3]}`)
			let shown = await next("", true)
			const [times, ends] = [[], []]
			for (const strength of [0.95, 0.9, 0.85]) {
				const started = Date.now()
				await page.keyboard.press("ArrowLeft")
				const draft = await next(shown, false)
				times.push(Date.now() - started)
				shown = await next(shown, true)
				ends.push(Date.now() - started)
				const {result} = await job(shown)
				assert.deepEqual([result.loras[0].unet, result.images[0].settings.steps], [strength, 20])
				// drafts are not listed among the images
				if (draft !== shown)
					await page.waitForFunction(
						async src => (await fetch(src)).status === 404 || (await fetch(src)).status === 410,
						draft
					)
			}
			note(`redrawn after ${times.join(", ")} ms, finished after ${ends.join(", ")} ms`)
			const shares = times.map((time, index) => time / ends[index])
			assert.ok(Math.min(...shares) < 0.8, `a draft takes ${shares} of the time of the image`)
			if (timed) assert.ok(Math.min(...times) < 2000, `redrawn after ${times} ms`)
		},
		{alone: true, expected: /404|410/}
	)

	test("an image is compared with itself without its LoRAs; sweeps and sheets", async page => {
		const id = await submit({prompt: "a fox <lora:pixel:0.5>", seed: 9, steps: 1})
		await ended(id)
		await page.goto(`/#/compare?job=${id}&image=0`)
		await page.waitForFunction(() => document.querySelector("textarea")?.value === "a fox")
		assert.equal(await page.getByLabel("Seed", {exact: true}).inputValue(), "9")
		await page.getByRole("radio", {name: "Strengths"}).check()
		await page.getByLabel("Images", {exact: true}).fill("3")
		await page.getByRole("button", {name: "Compare", exact: true}).click()
		for (const name of ["0", "0.25", "0.5"]) await page.getByRole("columnheader", {name, exact: true}).waitFor()
		await page.locator(".compare-sheet img").nth(2).waitFor()
		await page.getByRole("radio", {name: "Seeds"}).check()
		await page.getByLabel("Images", {exact: true}).fill("2")
		await page.keyboard.press("Control+Enter")
		await page.locator(".compare-sheet img").nth(3).waitFor()
		assert.deepEqual(await violations(page), [])
		await shot(page, "compare-seeds")
		await page.getByRole("radio", {name: "LoRA × LoRA"}).check()
		await page.getByRole("button", {name: "Add a LoRA"}).click()
		await page.setViewportSize({width: 360, height: 740})
		await page.getByRole("button", {name: "Compare", exact: true}).click()
		await page.locator(".compare-sheet img").nth(3).waitFor()
		assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 360)
		await page.locator(".compare-sheet").scrollIntoViewIfNeeded()
		await shot(page, "compare-pairs-phone")
		await page.reload()
		await page.getByLabel("LoRA 2").waitFor()
	})
}
