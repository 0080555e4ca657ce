// Queue: order, pause, cancel, errors, what ended.

export function flow({test, assert, api, submit, ended, violations, shot}) {
	test("waiting jobs are reordered, cancelled, run again and removed", async page => {
		await api("/v1/queue", {paused: true})
		try {
			const jobs = []
			for (const name of ["one", "two", "three"]) jobs.push(await submit({prompt: name, steps: 1}))
			await page.goto("/#/queue")
			const titles = page.locator("ol .queue-title")
			await page.waitForFunction(() => document.querySelectorAll("ol .queue-title").length === 3)
			const order = async (...names) => {
				await page.waitForFunction(
					expected =>
						[...document.querySelectorAll("ol .queue-title")].map(each => each.textContent).join() === expected,
					names.join()
				)
			}
			await page.getByRole("button", {name: "Move three"}).press("ArrowUp")
			await order("one", "three", "two")
			await page.locator(`[data-job=${jobs[1]}]`).getByRole("button", {name: "Run next"}).click()
			await order("two", "one", "three")
			await page.locator(`[data-job=${jobs[0]}] .grip`).dragTo(page.locator(`[data-job=${jobs[2]}]`))
			await order("two", "three", "one")
			assert.deepEqual(await violations(page), [])
			await shot(page, "queue-waiting")
			await page.getByRole("button", {name: "Cancel three"}).click()
			await order("two", "one")
			assert.equal(await titles.count(), 2)
			await page.getByRole("button", {name: "Resume the queue"}).click()
			await page.locator(`.queue-ended[data-job=${jobs[0]}]`).getByText("done").waitFor()
			await page.getByRole("button", {name: "Run again: three"}).click()
			await page.locator(".queue-ended", {hasText: "three"}).filter({hasText: "done"}).waitFor()
			await page
				.locator(`.queue-ended[data-job=${jobs[2]}]`)
				.getByRole("button", {name: "Remove from the list"})
				.click()
			await page.locator(`[data-job=${jobs[2]}]`).waitFor({state: "detached"})
		} finally {
			await api("/v1/queue", {paused: false})
		}
	})

	test("devices say what they hold, and each waiting job why it waits", async page => {
		await ended(await submit({prompt: "with a style", loras: [{name: "pixel"}], steps: 1}))
		await api("/v1/queue", {paused: true})
		try {
			const job = await submit({prompt: "one", steps: 1})
			await page.goto("/#/queue")
			await page.locator(`[data-job=${job}]`, {hasText: "Why it waits: the queue is paused"}).waitFor()
			const {devices, nodes} = await api("/v1/queue")
			for (const {name, models} of devices) {
				const row = page.locator(`[data-device="${name}"]`).filter({hasText: "ready"})
				await row.getByText(models.length ? `In memory: ${models.join(", ")}` : "Nothing").waitFor()
			}
			const holders = devices.filter(each => each.loras.includes("pixel")).map(each => each.name)
			for (const name of holders)
				await page
					.locator(`[data-device="${name}"]`)
					.getByText(/[, ]pixel\b/)
					.waitFor()
			assert.ok(devices.some(each => each.loras.includes("pixel")))
			for (const {name} of nodes) await page.getByRole("heading", {name}).waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "queue-devices")
			await page.setViewportSize({width: 360, height: 800})
			await shot(page, "queue-devices-phone")
			assert.ok(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth))
		} finally {
			await api("/v1/queue", {paused: false})
		}
	})

	test("an error is one line with what to do", async page => {
		await page.route("**/v1/jobs?state=done*", async route => {
			const answer = await (await route.fetch()).json()
			answer.jobs.unshift({
				...answer.jobs[0],
				id: "job-1",
				state: "failed",
				result: null,
				error: {code: "out_of_memory", message: "the device has too little free memory"}
			})
			await route.fulfill({json: answer})
		})
		await page.goto("/#/queue")
		await page.getByText("the device has too little free memory Try fewer or smaller images").waitFor()
	})
}
