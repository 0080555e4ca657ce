// Queue: order, pause, cancel, errors, what ended.

export function flow({test, assert, api, submit, violations, shot}) {
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
