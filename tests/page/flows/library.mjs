// The library: found, read, checked, converted, added and removed.
import {readFileSync} from "node:fs"

const PIXEL = new URL("../../../src/inweave/models/emoji/loras/pixel.safetensors", import.meta.url)

export function flow({test, assert, api, violations, shot}) {
	test("cards, table, search and details, without a violation in light and dark", async page => {
		await page.goto("/#/library")
		await page.getByRole("link", {name: /pixel/}).waitFor()
		// names that are attacks are text
		await page.getByText("<img src=x onerror=alert(1)>").first().waitFor()
		await page.getByText("duplicate", {exact: true}).first().waitFor()
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"}) // shell.mjs has axe look at these
			await shot(page, `library-cards-${scheme}`)
		}
		await page.keyboard.press("v")
		await page.getByRole("columnheader", {name: "AutoV2"}).waitFor()
		assert.deepEqual(await violations(page), [], "table")
		await shot(page, "library-table")
		await page.keyboard.press("/")
		await page.keyboard.type("pixel")
		await page.getByText(/, 1 shown/).waitFor()
		assert.match(page.url(), /query=pixel/)
		await page.getByRole("link", {name: "pixel"}).press("Enter")
		const dialog = page.getByRole("dialog", {name: "pixel"})
		await dialog.getByText("8845bf35ff", {exact: true}).waitFor()
		assert.match(page.url(), /lora=lora-/)
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
			assert.deepEqual(await violations(page), [], `details, ${scheme}`)
			await shot(page, `library-details-${scheme}`)
		}
		await page.reload()
		await dialog.waitFor()
		await page.keyboard.press("Escape")
		await dialog.waitFor({state: "detached"})
		assert.doesNotMatch(page.url(), /lora=/)
	})

	test(
		"compatibility, the placement of every tensor, and conversion to another dialect",
		async page => {
			await page.goto("/#/library?query=pixel")
			await page.getByRole("link", {name: /pixel/}).click()
			const dialog = page.getByRole("dialog", {name: "pixel"})
			await dialog.getByRole("button", {name: "Check"}).click()
			await dialog.getByText("all 300 tensors have a place").waitFor()
			await dialog.getByText("Placement of every tensor (300)").click()
			await dialog.getByRole("searchbox").fill("mid_block")
			await dialog
				.getByRole("cell", {name: /^mid_block/})
				.first()
				.waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "library-placements")
			await dialog.getByLabel("Model or base").selectOption("base:sdxl")
			await dialog.getByRole("button", {name: "Check"}).click()
			await dialog.getByText("this file is for inweave/emoji").waitFor()
			await dialog.getByLabel("Convert to").selectOption("bfl")
			await dialog.getByRole("button", {name: "Convert"}).click()
			await dialog.getByText("BFL files hold Flux transformers only").first().waitFor()
			await shot(page, "library-refusals")
			await dialog.getByLabel("Convert to").selectOption("peft")
			await dialog.getByRole("button", {name: "Convert"}).click()
			const [download] = await Promise.all([
				page.waitForEvent("download"),
				dialog.getByRole("link", {name: /pixel-peft.zip/}).click()
			])
			assert.equal(download.suggestedFilename(), "pixel-peft.zip")
		},
		{expected: /422/}
	)

	test("a sample shows a LoRA with and without it, and becomes its image", async page => {
		await page.goto("/#/library?query=pixel")
		await page.getByRole("link", {name: /^pixel/}).click()
		const dialog = page.getByRole("dialog", {name: "pixel"})
		await dialog.getByRole("button", {name: "Make sample images"}).click()
		const images = dialog.locator(".beforeafter img")
		await images.nth(1).waitFor()
		await dialog.getByText("“a cat”, seed 1, inweave/emoji").waitFor()
		const {sample} = await api("/v1/loras/pixel")
		assert.deepEqual([sample.prompt, sample.seed, sample.strength], ["a cat", 1, 1])
		await page.waitForFunction(() =>
			[...document.querySelectorAll("dialog .beforeafter img")].every(each => each.complete && each.naturalWidth)
		)
		assert.deepEqual(await violations(page), [])
		await shot(page, "library-sample")
		await page.keyboard.press("Escape")
		await page.locator(".library-card img[src*='/sample?']").waitFor()
		const {images: kept} = await api("/v1/gallery?q=a+cat")
		assert.deepEqual(kept, [], "samples stay out of the gallery")
	})

	test(
		"files are added by dropping them, refused with the reason, and deleted",
		async page => {
			await page.setViewportSize({width: 360, height: 740})
			await page.goto("/#/library")
			await page.getByRole("link", {name: /pixel/}).waitFor()
			const buffer = readFileSync(PIXEL)
			await page.locator("main input[type=file]").setInputFiles([
				{name: "my style #1.safetensors", mimeType: "application/octet-stream", buffer},
				{name: "junk.safetensors", mimeType: "application/octet-stream", buffer: Buffer.from("junk")},
				{name: "model.ckpt", mimeType: "application/octet-stream", buffer: Buffer.from("x")}
			])
			await page.getByText("Checked and added").waitFor()
			await page.getByText("Only .safetensors files are accepted").waitFor()
			await page.getByText(/LoRA junk/).waitFor()
			assert.deepEqual(await violations(page), [])
			assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 360)
			await shot(page, "library-phone")
			await page.locator(".library-upload").getByRole("link", {name: "my style -1"}).click()
			const dialog = page.getByRole("dialog", {name: "my style -1", exact: true})
			await dialog.waitFor()
			await shot(page, "library-phone-details")
			await dialog.getByRole("button", {name: "Delete"}).click()
			await page.getByRole("dialog", {name: "Delete my style -1?"}).getByRole("button", {name: "Delete"}).click()
			await page.getByText("my style -1 was deleted").waitFor()
			const {loras} = await api("/v1/loras")
			assert.ok(!loras.some(lora => lora.name.startsWith("my style")))
		},
		{alone: true, expected: /422/}
	)
}
