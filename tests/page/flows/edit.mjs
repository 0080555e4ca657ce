// Edit: an image is opened, a mask painted, undone, taken from alpha; the request is what the page shows.
const SIZE = 64

export function flow({test, assert, submit, ended, violations, shot}) {
	const canvas = page => page.getByRole("application", {name: "Image and mask"})
	/** Drop an image of rectangles [color, x, y, width, height] on the page. */
	const drop = (page, rectangles, size = SIZE) =>
		page.evaluate(
			async ([rectangles, side]) => {
				const canvas = Object.assign(document.createElement("canvas"), {width: side, height: side})
				const context = canvas.getContext("2d")
				for (const [color, ...place] of rectangles) {
					context.fillStyle = color
					context.fillRect(...place)
				}
				const blob = await new Promise(resolve => canvas.toBlob(resolve))
				const transfer = new DataTransfer()
				transfer.items.add(new File([blob], "drawn.png", {type: "image/png"}))
				window.dispatchEvent(new DragEvent("drop", {dataTransfer: transfer, cancelable: true}))
			},
			[rectangles, size]
		)
	const SQUARES = [
		["rgb(40, 90, 200)", 0, 0, 256, 256],
		["rgb(250, 200, 30)", 8, 8, 20, 20]
	]
	/** A point of the image, in the window; the whole image is shown. */
	const at = async (page, x, y, size = SIZE) => {
		const box = await canvas(page).boundingBox()
		const zoom = Math.min(box.width - 24, box.height - 24) / size
		return [box.x + box.width / 2 + (x - size / 2) * zoom, box.y + box.height / 2 + (y - size / 2) * zoom]
	}
	const stroke = async (page, from, to) => {
		await page.mouse.move(...(await at(page, ...from)))
		await page.mouse.down()
		await page.mouse.move(...(await at(page, ...to)), {steps: 4})
		await page.mouse.up()
	}
	/** Red, green, blue and alpha of the pixels of files, decoded by the browser. */
	const pixels = (page, urls) =>
		page.evaluate(
			list =>
				Promise.all(
					list.map(async url => {
						const bitmap = await createImageBitmap(await (await fetch(url)).blob())
						const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext("2d")
						context.drawImage(bitmap, 0, 0)
						return [...context.getImageData(0, 0, bitmap.width, bitmap.height).data]
					})
				),
			urls
		)
	const job = async page => {
		await page.waitForFunction(() => /[?&]edit=job-/.test(location.hash))
		return ended(await page.evaluate(() => new URLSearchParams(location.hash.split("?")[1]).get("edit")))
	}
	const open = async (page, rectangles = SQUARES, size = SIZE) => {
		await page.goto("/#/edit?steps=2&seed=7&strength=1&feather=0")
		await page.getByText("Choose an image to edit").waitFor()
		await drop(page, rectangles, size)
		await page.getByText(`${size} × ${size} · no mask`).waitFor()
	}
	const masked = page => page.getByText(/will be repainted; the rest stays unchanged/)

	test(
		"a mask is painted and repainted; everything else keeps its bits",
		async page => {
			await open(page)
			assert.equal(await page.getByRole("button", {name: "Transform the image"}).isEnabled(), true)
			// the worker has it: a reload does not lose it
			await page.waitForFunction(() => /[?&]upload=upload-/.test(location.hash))
			await page.reload()
			await page.getByText(`${SIZE} × ${SIZE} · no mask`).waitFor()
			await page.getByLabel("Brush size").first().fill("12")
			await stroke(page, [40, 40], [56, 40])
			await masked(page).waitFor()
			await page.getByLabel("Prompt", {exact: true}).fill("a red apple <lora:pixel:0.5>")
			await shot(page, "edit-mask")
			await page.getByRole("button", {name: "Inpaint the mask"}).click()
			const made = await job(page)
			assert.deepEqual([made.state, made.operation], ["done", "image_inpaint"])
			assert.deepEqual(
				[made.settings.strength, made.settings.feather ?? 0, made.settings.seed, made.settings.steps],
				[1, 0, 7, 2]
			)
			assert.equal(made.result.loras[0].name, "pixel")
			const files = `/v1/jobs/${made.id}/files/`
			const [source, mask, result] = await pixels(page, [
				`${files}input-init.png`,
				`${files}input-mask.png`,
				made.result.images[0].url
			])
			assert.equal(result.length, SIZE * SIZE * 4)
			let inside = 0
			let changed = 0
			for (let y = 0; y < SIZE; y += 1)
				for (let x = 0; x < SIZE; x += 1) {
					const place = 4 * (y * SIZE + x)
					// what was drawn is what was sent: white within six pixels of the stroke, black beyond, nothing between
					const distance = Math.hypot(x + 0.5 - Math.min(56, Math.max(40, x + 0.5)), y + 0.5 - 40)
					const white = mask[place] === 255
					assert.ok(white || mask[place] === 0)
					if (distance < 5) assert.ok(white, `${x}, ${y} is in the stroke`)
					if (distance > 7) assert.ok(!white, `${x}, ${y} is not in the stroke`)
					const drawn = x >= 8 && x < 28 && y >= 8 && y < 28 ? [250, 200, 30] : [40, 90, 200]
					assert.deepEqual(source.slice(place, place + 3), drawn)
					const now = result.slice(place, place + 3)
					if (!white) assert.deepEqual(now, drawn, `${x}, ${y} is outside of the mask`)
					else inside += 1
					if (white && now.join() !== drawn.join()) changed += 1
				}
			assert.ok(changed > inside / 2, `${changed} of ${inside} pixels changed`)

			const handle = page.getByLabel("Before/after slider")
			await handle.waitFor()
			assert.deepEqual(await violations(page), [])
			await shot(page, "edit-result")
			// a reload restores the image, the mask and the result
			await page.reload()
			await handle.waitFor()
			await page.keyboard.press("x")
			await masked(page).waitFor()
			assert.equal(await page.getByLabel("Prompt", {exact: true}).inputValue(), "a red apple <lora:pixel:0.5>")
			await page.keyboard.press("x")
			await page.getByRole("button", {name: "Edit the result"}).click()
			await page.getByText("no mask: the whole image changes").waitFor()
			await page.waitForFunction(id => location.hash.includes(`job=${id}`), made.id)
			await page.getByRole("button", {name: "Undo", exact: true}).last().click()
			await page.waitForFunction(id => location.hash.includes(`edit=${id}`), made.id)
		},
		{core: true}
	)

	test("undo and redo, clear and invert, eraser, keys, zoom, and the mask of alpha", async page => {
		await open(page, [["rgb(200, 40, 60)", 0, 0, 32, 64]])
		const undo = page.getByRole("button", {name: "Undo", exact: true})
		const share = page.getByText(/% will be repainted/)
		const percent = async text => page.getByText(`· ${text}% will be repainted`).waitFor()
		assert.equal(await undo.isDisabled(), true)
		await page.keyboard.press("a") // the right half is transparent
		await percent(50)
		await page.keyboard.press("i")
		await page.keyboard.press("i")
		await page.keyboard.press("Control+z")
		await page.keyboard.press("Control+z")
		await percent(50)
		await page.keyboard.press("Control+z")
		await page.getByText("no mask").waitFor()
		assert.equal(await undo.isDisabled(), true)
		await page.keyboard.press("Control+Shift+z")
		await percent(50)
		await page.keyboard.press("e")
		await page.getByLabel("Brush size").first().fill("32")
		await stroke(page, [48, 8], [48, 56])
		await page.waitForFunction(() => !/ 50%/.test(document.querySelector(".edit-tools [role=status]").textContent))
		const erased = await share.textContent()
		await undo.click()
		await percent(50)
		await page.getByRole("button", {name: "Redo"}).click()
		await page.getByText(erased).waitFor()
		await page.keyboard.press("Delete")
		await page.getByText("no mask").waitFor()
		// text keeps its own undo
		await page.getByLabel("Prompt", {exact: true}).fill("a fox")
		await page.keyboard.press("Control+z")
		await page.getByText("no mask").waitFor()
		// with the keys alone
		await page.keyboard.press("Escape")
		await canvas(page).focus()
		await page.keyboard.press("b")
		await page.keyboard.press("Shift+ArrowRight")
		await share.waitFor()
		await page.keyboard.press("+")
		await page.keyboard.press("0")
		const box = await canvas(page).boundingBox()
		const whole = Math.round((Math.min(box.width - 24, box.height - 24) / SIZE) * 100)
		await page.getByText(`${whole}%`, {exact: true}).waitFor()
		await page.mouse.move(box.x + 50, box.y + 50)
		await page.mouse.wheel(0, -300)
		await page.getByText(`${whole}%`, {exact: true}).waitFor({state: "detached"})
		await page.keyboard.press("?")
		const sheet = page.getByRole("dialog", {name: "Keyboard shortcuts"})
		for (const name of ["Larger brush", "Softer edge", "Mask transparent areas", "Redo"])
			await sheet.getByText(name).waitFor()
		await page.keyboard.press("Escape")
	})

	test(
		"a generated image is transformed as a whole, without a mask",
		async page => {
			const id = await submit({prompt: "a cup of tea <lora:ink:0.3>", negative_prompt: "blur", seed: 3})
			await ended(id)
			await page.goto("/#/generate")
			await page.locator(`.stage[data-job=${id}]`).getByRole("link", {name: "Edit"}).click()
			await page.getByText("64 × 64 · no mask").waitFor()
			assert.equal(await page.getByLabel("Prompt", {exact: true}).inputValue(), "a cup of tea <lora:ink:0.3>")
			assert.equal(await page.getByLabel("Negative prompt").inputValue(), "blur")
			await page.getByLabel("Steps").fill("2")
			await page.getByLabel("Strength", {exact: true}).first().fill("0.5")
			await page.keyboard.press("Control+Enter")
			const made = await job(page)
			assert.deepEqual([made.state, made.operation, made.settings.strength], ["done", "image_transform", 0.5])
			const [source, original] = await pixels(page, [
				`/v1/jobs/${made.id}/files/input-init.png`,
				`/v1/jobs/${id}/files/0.png`
			])
			assert.deepEqual(source, original)
			await page.getByLabel("Before/after slider").waitFor()
		},
		{alone: true} // Generate shows the newest image, of whomever
	)

	test(
		"touch: one finger paints, two zoom",
		async (page, context) => {
			await open(page)
			const client = await context.newCDPSession(page)
			const touch = (type, ...points) =>
				client.send("Input.dispatchTouchEvent", {type, touchPoints: points.map(([x, y], id) => ({x, y, id}))})
			const [one, two, three] = [await at(page, 20, 20), await at(page, 40, 40), await at(page, 60, 60)]
			await touch("touchStart", one)
			await touch("touchMove", two)
			await touch("touchEnd")
			await masked(page).waitFor()
			await page.getByRole("button", {name: "Undo", exact: true}).click()
			await page.getByText("no mask").waitFor()
			const zoom = await page.locator(".edit-zoom").textContent()
			await touch("touchStart", one)
			await touch("touchStart", one, two)
			await touch("touchMove", one, three)
			await touch("touchEnd")
			await page.waitForFunction(before => document.querySelector(".edit-zoom").textContent !== before, zoom)
			await page.getByText("no mask").waitFor() // the first of two fingers has not painted
			assert.equal(await page.getByRole("button", {name: "Undo", exact: true}).isDisabled(), true)
		},
		{context: {hasTouch: true, viewport: {width: 360, height: 740}}}
	)

	test("a file that is not an image is refused with a message, and a job runs with its progress", async page => {
		await page.goto("/#/edit?prompt=a+castle&steps=150&strength=1")
		await page
			.locator(".dropzone input")
			.first()
			.setInputFiles({name: "notes.txt", mimeType: "text/plain", buffer: Buffer.from("x")})
		await page.getByText("notes.txt is not an image this browser can read.").waitFor()
		await drop(page, SQUARES, 256)
		await page.getByText("256 × 256 · no mask").waitFor()
		await page.getByLabel("Images", {exact: true}).fill("6")
		await page.getByRole("button", {name: "Transform the image"}).click()
		await page.getByText(/Step \d+ of 900/).waitFor()
		await shot(page, "edit-running")
		await page.reload() // joins it again
		await page.getByText(/Step \d+ of 900/).waitFor()
		await page.keyboard.press("Escape")
		assert.equal((await job(page)).state, "cancelled")
	})
}
