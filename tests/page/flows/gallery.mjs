// The gallery: search, stars, albums, selections, the trash, imports, the viewer.
import {readFileSync} from "node:fs"

const IMAGES = new URL("../../../docs/images/", import.meta.url)

export function flow({test, assert, api, submit, ended, address, violations, shot}) {
	const made = async fields => (await ended(await submit({width: 64, height: 64, steps: 1, ...fields}))).result.images
	const tiles = page => page.locator(".gallery-tile")
	const open = async (page, query = "") => {
		await page.goto(`/#/gallery${query}`)
		await page.locator(".gallery-tile, .empty").first().waitFor()
	}
	const count = (page, n) => page.waitForFunction(n => document.querySelectorAll(".gallery-tile").length === n, n)

	test("images are searched, filtered, starred and counted, without a violation in light and dark", async page => {
		await made({prompt: "gray elephant <lora:pixel:0.5>", count: 3, seed: 40})
		await made({prompt: "pink elephant", seed: 50})
		await open(page)
		await page.getByLabel("Search", {exact: true}).fill("Elephant")
		await page.getByText("4 images found").waitFor()
		await count(page, 4)
		assert.match(page.url(), /q=Elephant/)
		await page.getByLabel("LoRA", {exact: true}).selectOption("pixel")
		await count(page, 3)
		const first = tiles(page).first()
		await first.hover()
		await first.getByRole("button", {name: /^Star /}).click()
		await first.getByRole("button", {name: /^Remove the star/}).waitFor()
		await page.getByRole("button", {name: "Starred"}).click()
		await count(page, 1)
		await page.reload()
		await count(page, 1)
		await page.getByRole("button", {name: /^Remove the star/}).click()
		await page.getByText("No image matches").waitFor()
		await page.getByRole("button", {name: "Show all"}).click()
		await tiles(page).nth(3).waitFor()
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
			assert.deepEqual(await violations(page), [], scheme)
			await shot(page, `gallery-grid-${scheme}`)
		}
	})

	test("a selection by Shift, Control and keys is deleted, restored, and sorted into an album", async page => {
		await made({prompt: "blue whale", count: 5, seed: 60})
		await open(page, "?q=blue+whale")
		await count(page, 5)
		await tiles(page)
			.nth(0)
			.getByRole("button")
			.first()
			.click({modifiers: ["Control"]})
		await page.getByText("1 selected").waitFor()
		await tiles(page)
			.nth(2)
			.getByRole("button")
			.first()
			.click({modifiers: ["Shift"]})
		await page.getByText("3 selected").waitFor()
		await tiles(page).nth(1).getByRole("checkbox").click()
		await page.getByText("2 selected").waitFor()
		assert.deepEqual(await violations(page), [])
		await shot(page, "gallery-selection")
		await page.keyboard.press("Delete")
		await page.getByText("2 images moved to the trash").waitFor()
		await count(page, 3)
		await page.getByRole("button", {name: "Undo"}).click()
		await count(page, 5)
		await page.keyboard.press("Control+a")
		await page.getByText("5 selected").waitFor()
		await page.getByRole("button", {name: "Add to album"}).click()
		const dialog = page.getByRole("dialog", {name: "Add 5 images to an album"})
		await dialog.getByLabel("New album").fill("<b>Sea</b>")
		assert.deepEqual(await violations(page), [])
		await dialog.getByRole("button", {name: "Create"}).click()
		await page.getByText("5 images added to <b>Sea</b>").waitFor()
		await page.goto("/#/gallery")
		await page.getByLabel("Album", {exact: true}).selectOption({label: "<b>Sea</b> (5)"})
		await count(page, 5)
		await tiles(page).nth(4).getByRole("checkbox").click()
		await page.getByRole("button", {name: "Remove from album"}).click()
		await count(page, 4)
		await page.getByRole("button", {name: "Rename album"}).click()
		await page.getByRole("dialog").getByLabel("Album").fill("Deep sea")
		await page.getByRole("dialog").getByRole("button", {name: "Rename album"}).click()
		await page.getByRole("option", {name: "Deep sea (4)"}).waitFor({state: "attached"})
		await page.getByRole("button", {name: "Delete album"}).click()
		await page.getByRole("dialog").getByRole("button", {name: "Delete album"}).click()
		await page.getByText("Deep sea was deleted").waitFor()
		assert.equal((await api("/v1/gallery?q=blue+whale")).total, 5)
	})

	test("the trash restores, and deletes for good", async page => {
		const [kept, gone] = await made({prompt: "old boot", count: 2})
		await api("/v1/gallery/delete", {images: [kept.gallery, gone.gallery]})
		await open(page, "?trashed=1&q=old+boot")
		await count(page, 2)
		await tiles(page).nth(0).getByRole("checkbox").click()
		await page.getByRole("button", {name: "Restore", exact: true}).click()
		await page.getByText("1 image restored").waitFor()
		await count(page, 1)
		await tiles(page).nth(0).getByRole("checkbox").click()
		await page.getByRole("button", {name: "Delete permanently"}).click()
		assert.deepEqual(await violations(page), [])
		await page
			.getByRole("dialog", {name: "Delete 1 image permanently?"})
			.getByRole("button", {name: "Delete permanently"})
			.click()
		await page.getByText("1 image deleted").waitFor()
		assert.equal((await api("/v1/gallery?q=old+boot")).total, 1)
		assert.equal((await api("/v1/gallery?q=old+boot&trashed=true")).total, 0)
	})

	test(
		"the viewer: arrows, zoom and pan, details, deleting, and the settings in Generate",
		async page => {
			await made({prompt: "tall giraffe <lora:ink:0.4>", count: 3, seed: 70, steps: 2, negative_prompt: "blur"})
			await open(page, "?q=tall+giraffe")
			await count(page, 3)
			await tiles(page).first().getByRole("button").first().click()
			const viewer = page.getByRole("dialog", {name: /tall giraffe/})
			await viewer.getByText("1 of 3").waitFor()
			await page.waitForURL(/image=image-/)
			await viewer.getByText("blur", {exact: true}).waitFor()
			await viewer.locator("dt", {hasText: /^Steps$/}).waitFor()
			for (const scheme of ["light", "dark"]) {
				await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
				assert.deepEqual(await violations(page), [], scheme)
				await shot(page, `gallery-viewer-${scheme}`)
			}
			await page.keyboard.press("ArrowRight")
			await viewer.getByText("2 of 3").waitFor()
			const image = viewer.locator(".gallery-viewer-image")
			const box = await image.boundingBox()
			await page.mouse.move(box.x + box.width / 4, box.y + box.height / 4)
			await page.mouse.wheel(0, -300)
			await page.waitForFunction(() => !/^100%$/.test(document.querySelector(".gallery-viewer-zoom").textContent))
			const large = await image.boundingBox()
			assert.ok(large.width > box.width)
			await page.mouse.down()
			await page.mouse.move(box.x + box.width / 4 + 60, box.y + box.height / 4 + 40, {steps: 4})
			await page.mouse.up()
			const moved = await image.boundingBox()
			assert.ok(moved.x > large.x && moved.y > large.y, JSON.stringify([large, moved]))
			await page.keyboard.press("0")
			await viewer.getByText("100%").waitFor()
			await page.mouse.dblclick(box.x + box.width / 2, box.y + box.height / 2)
			await viewer.getByText("300%").waitFor()
			await page.keyboard.press("ArrowRight")
			await viewer.getByText("3 of 3").waitFor()
			await viewer.getByText("100%").waitFor()
			await page.keyboard.press("Delete")
			await viewer.getByText("2 of 2").waitFor()
			await viewer.getByRole("button", {name: "Undo"}).click() // over the dialog
			await viewer.getByText("2 of 3").waitFor()
			await page.keyboard.press("Escape")
			await viewer.waitFor({state: "detached"})
			assert.doesNotMatch(page.url(), /image=/)
			await tiles(page).nth(0).getByRole("button").first().press("Enter")
			await viewer.getByRole("button", {name: "Restore settings to Generate"}).click()
			await page.waitForURL(/#\/generate/)
			const prompt = page.getByLabel("Prompt", {exact: true})
			await prompt.waitFor()
			assert.equal(await prompt.inputValue(), "tall giraffe <lora:ink:0.4>")
			assert.equal(await page.getByLabel("Steps").inputValue(), "2")
			assert.equal(await page.getByLabel("Seed", {exact: true}).inputValue(), "70")
		},
		{core: true}
	)

	test(
		"on a phone: a swipe, nothing wider than the screen, selections by touch",
		async (page, context) => {
			await made({prompt: "small hedgehog", count: 2, seed: 80})
			await open(page, "?q=small+hedgehog")
			await count(page, 2)
			const width = () => page.evaluate(() => document.documentElement.scrollWidth)
			assert.ok((await width()) <= 390)
			await tiles(page).nth(0).getByRole("checkbox").tap()
			await tiles(page).nth(1).getByRole("button").first().tap() // selects now
			await page.getByText("2 selected").waitFor()
			assert.ok((await width()) <= 390)
			assert.deepEqual(await violations(page), [])
			await shot(page, "gallery-phone-selection")
			await page.getByRole("button", {name: "Clear selection"}).tap()
			await tiles(page).nth(0).getByRole("button").first().tap()
			const viewer = page.getByRole("dialog", {name: /small hedgehog/})
			await viewer.getByText("1 of 2").waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "gallery-phone-viewer")
			const client = await context.newCDPSession(page)
			const touch = (type, ...touchPoints) => client.send("Input.dispatchTouchEvent", {type, touchPoints})
			await touch("touchStart", {x: 300, y: 300})
			await touch("touchMove", {x: 200, y: 302})
			await touch("touchEnd")
			await viewer.getByText("2 of 2").waitFor()
			await touch("touchStart", {x: 150, y: 300}, {x: 250, y: 300})
			await touch("touchMove", {x: 100, y: 300}, {x: 300, y: 300})
			await touch("touchEnd")
			await viewer.getByText("200%").waitFor()
			await viewer.getByRole("button", {name: "Image details"}).tap()
			await viewer.getByText("Negative prompt").waitFor({state: "detached"})
			await viewer.locator("dt", {hasText: /^File$/}).waitFor()
			await shot(page, "gallery-phone-details")
		},
		{context: {hasTouch: true, isMobile: true, viewport: {width: 390, height: 844}}}
	)

	test(
		"a folder is imported with its settings; what is no image is refused",
		async page => {
			const images = await made({prompt: "rare import", seed: 90})
			const bytes = Buffer.from(await (await fetch(address + images[0].url)).arrayBuffer())
			await api("/v1/gallery/delete", {images: [images[0].gallery]})
			await open(page)
			await page.getByRole("button", {name: "Import"}).click()
			const dialog = page.getByRole("dialog", {name: "Import images"})
			assert.deepEqual(await violations(page), [])
			const files = [
				{name: "my image.png", mimeType: "image/png", buffer: bytes},
				{name: "photo.webp", mimeType: "image/webp", buffer: readFileSync(new URL("page-phone.webp", IMAGES))},
				{name: "broken.png", mimeType: "image/png", buffer: Buffer.from("junk")},
				{name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("x")}
			]
			await dialog.locator(".dropzone input").setInputFiles(files)
			await dialog.getByText("2 images imported").waitFor()
			await dialog.getByText("1 file left out: not PNG, JPEG or WebP").waitFor()
			await dialog.getByText("1 file refused").click()
			await dialog.getByText(/^broken.png: .*not PNG, JPEG or WEBP/).waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "gallery-import")
			await dialog.locator(".dropzone input").setInputFiles(files.slice(0, 1))
			await dialog.getByText("0 images imported, 1 was here already").waitFor()
			await dialog.getByRole("button", {name: "Close"}).first().click()
			await page.getByLabel("Search", {exact: true}).fill("rare import")
			await count(page, 1)
			const [row] = (await api("/v1/gallery?q=rare+import")).images
			assert.equal(row.path, "imported/my image.png")
		},
		{expected: /400/}
	)

	test("a long list is loaded while it is scrolled", async page => {
		const row = (await api("/v1/gallery?limit=1")).images[0] ?? (await made({}))[0]
		const rows = Array.from({length: 400}, (_, index) => ({...row, id: `image-${index}`, created: 4e9 - index}))
		await page.route(/\/v1\/gallery\?/, async route => {
			const query = new URL(route.request().url()).searchParams
			const from = Number(query.get("cursor") ?? 0)
			const to = from + Number(query.get("limit"))
			const next = to < rows.length ? String(to) : null
			await route.fulfill({json: {images: rows.slice(from, to), next, total: from ? null : rows.length}})
		})
		await open(page)
		await page.getByText("400 images").waitFor()
		assert.ok((await tiles(page).count()) < 400)
		for (let turn = 0; turn < 40 && (await tiles(page).count()) < 400; turn += 1) {
			await page.mouse.wheel(0, 4000)
			await page.waitForTimeout(100)
		}
		assert.equal(await tiles(page).count(), 400)
		assert.equal(await page.locator(".gallery-more").count(), 0)
	})
}
