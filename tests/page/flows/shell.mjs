// The frame around every view.
const VIEWS = ["generate", "compare", "edit", "gallery", "library", "train", "queue"]

export function flow({test, assert, api, submit, ended, violations, shot, timed}) {
	test("every view opens, in light and dark, without a violation of WCAG AA", async page => {
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
			for (const view of VIEWS) {
				await page.goto(`/#/${view}`)
				await page.locator(`main.view-${view} > *`).first().waitFor()
				assert.deepEqual(await violations(page), [], `${view}, ${scheme}`)
				await shot(page, `${view}-${scheme}`)
			}
		}
	})

	test("nothing is wider than a phone", async page => {
		await page.setViewportSize({width: 360, height: 740})
		for (const view of VIEWS) {
			await page.goto(`/#/${view}`)
			await page.locator(`main.view-${view} > *`).first().waitFor()
			const width = await page.evaluate(() => document.documentElement.scrollWidth)
			assert.ok(width <= 360, `${view} is ${width} pixels wide`)
			await shot(page, `${view}-phone`)
		}
	})

	test(
		"the first paint is within a second, and nothing shifts",
		async (page, _, note) => {
			await page.addInitScript(() => {
				window.shift = 0
				window.moved = []
				window.shifts = new PerformanceObserver(list => window.count(list.getEntries()))
				window.count = entries => {
					for (const entry of entries) {
						if (entry.hadRecentInput) continue
						window.shift += entry.value
						for (const {node, previousRect: was, currentRect: is} of entry.sources)
							window.moved.push(
								`${(node?.outerHTML ?? node?.textContent ?? "").slice(0, 80)} y ${was.y} to ${is.y}, x ${was.x} to ${is.x}`
							)
					}
				}
				window.shifts.observe({type: "layout-shift", buffered: true})
			})
			await ended(await submit({prompt: "a red apple <lora:pixel:0.5>", steps: 1}))
			const paints = []
			const fast = () => paints.some(paint => paint < 1000)
			/** Fails where something has moved; gives the time of the first paint. */
			const settled = async () => {
				const {paint, shift, moved} = await page.evaluate(async () => {
					await document.fonts.ready
					for (let frame = 0; frame < 10; frame += 1) await new Promise(requestAnimationFrame)
					window.count(window.shifts.takeRecords())
					return {
						paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
						shift: window.shift,
						moved: window.moved
					}
				})
				assert.ok(shift < 0.01, `layout shift of ${shift}\n${moved.join("\n")}`)
				return paint
			}
			const visit = async () => {
				await page.goto("about:blank")
				await page.goto("/#/generate")
				await page.locator(".lora-card").first().waitFor()
				await page.locator(".gallery-item").first().waitFor()
				await page.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length)
				await page.waitForFunction(() => [...document.images].every(each => each.complete || each.loading === "lazy"))
				const paint = await settled()
				paints.push(paint)
			}
			for (let count = 0; count < (timed ? 8 : 2) && !fast(); count += 1) await visit() // the best visit counts
			// a slow worker tells one thing after the other, the last ones after the view was drawn without them
			const late = ["capabilities", "loras\\?limit=1000", "jobs\\?state=done"]
			for (const [index, path] of late.entries())
				await page.route(new RegExp(`/v1/${path}`), async route => {
					await new Promise(resolve => setTimeout(resolve, 1700 + 250 * index))
					await route.continue()
				})
			await visit()
			await page.unrouteAll()
			// what runs makes room for what is done
			const job = await submit({steps: 150, count: 6, width: 256, height: 256})
			await visit()
			await page.locator(`.stage[data-job=${job}]`).waitFor()
			await api(`/v1/jobs/${job}`, undefined, "DELETE")
			await page.locator(`.stage[data-job=${job}]`).waitFor({state: "detached"})
			await page.locator(".stage img").waitFor()
			await settled()
			// a notice comes and goes
			await page.route("**/ready", route => route.fulfill({status: 503, json: {ready: false, reason: "the model"}}))
			await visit()
			await page.getByText("Not ready: the model").waitFor()
			await page.unrouteAll()
			await page.getByText("Not ready").waitFor({state: "detached"})
			await settled()
			note(`first paint after ${paints.map(Math.round).join(", ")} ms`)
			if (timed) assert.ok(fast(), `first paint after ${paints} ms`)
		},
		{alone: true}
	)

	test("keys lead to views, and ? lists them", async page => {
		await page.goto("/")
		await page.locator(".rail-link").first().waitFor()
		await page.keyboard.press(String(VIEWS.length))
		await page.waitForURL("**/#/queue")
		await page.keyboard.press("?")
		const sheet = page.getByRole("dialog", {name: "Keyboard shortcuts"})
		await sheet.getByText("Go to Library").waitFor()
		await page.keyboard.press("Escape")
		await sheet.waitFor({state: "detached"})
		await page.keyboard.press("t")
		assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light")
	})
}
