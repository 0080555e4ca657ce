// A worker with a token asks for it once, in a form of its own; images and streams work afterwards.

export function flow({test, assert, ask, browser, violations, shot}) {
	test(
		"the token opens the page, and a wrong one does not",
		async page => {
			const {address, token} = await ask("token")
			await page.goto(`${address}/`)
			await page.getByRole("heading", {name: "This worker is locked"}).waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "token")
			await page.getByLabel("Token").fill("not the token")
			await page.getByRole("button", {name: "Unlock"}).click()
			await page.getByText("Wrong token.").waitFor()
			await page.getByLabel("Token").fill(token)
			await page.keyboard.press("Enter")
			await page.locator(".lora-card", {hasText: "pixel"}).first().waitFor()
			await page.reload()
			await page.locator(".lora-card", {hasText: "pixel"}).first().waitFor()
			assert.equal(await page.evaluate(() => document.cookie), "") // out of reach of scripts
			await page.getByRole("button", {name: "Lock this browser"}).click()
			await page.getByRole("heading", {name: "This worker is locked"}).waitFor()
			assert.ok(browser.isConnected())
		},
		{expected: /401/}
	)
}
