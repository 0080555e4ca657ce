// Train: images dropped, captions changed together, the check's report, a run with its loss, and its LoRA in a prompt.
import {mkdirSync, mkdtempSync, rmSync, writeFileSync} from "node:fs"
import {tmpdir} from "node:os"
import {join} from "node:path"
import {deflateSync} from "node:zlib"

/** CRC-32 of PNG chunks. */
function crc(bytes) {
	let value = 0xffffffff
	for (const byte of bytes) {
		value ^= byte
		for (let bit = 0; bit < 8; bit += 1) value = value & 1 ? (value >>> 1) ^ 0xedb88320 : value >>> 1
	}
	return (value ^ 0xffffffff) >>> 0
}

/** An image of one color with a stripe, so that no two are the same. */
function png(width, height, [red, green, blue]) {
	const rows = Buffer.alloc((width * 3 + 1) * height)
	for (let y = 0; y < height; y += 1) {
		for (let x = 0; x < width; x += 1) {
			const stripe = Math.abs(x - y) < 12 ? 0.4 : 1
			rows.set([red * stripe, green * stripe, blue * stripe], y * (width * 3 + 1) + 1 + x * 3)
		}
	}
	const chunk = (type, data) => {
		const body = Buffer.concat([Buffer.from(type), data])
		const out = Buffer.alloc(body.length + 8)
		out.writeUInt32BE(data.length)
		body.copy(out, 4)
		out.writeUInt32BE(crc(body), body.length + 4)
		return out
	}
	const head = Buffer.alloc(13)
	head.writeUInt32BE(width, 0)
	head.writeUInt32BE(height, 4)
	head.set([8, 2, 0, 0, 0], 8)
	const signature = Buffer.from([137, 80, 78, 71, 13, 10, 26, 10])
	return Buffer.concat([
		signature,
		chunk("IHDR", head),
		chunk("IDAT", deflateSync(rows)),
		chunk("IEND", Buffer.alloc(0))
	])
}

const FILES = [
	["red apple.png", 128, 128, [210, 60, 50]],
	["green (pear).png", 128, 128, [80, 160, 70]],
	["wide.png", 400, 200, [60, 90, 180]],
	["tall.png", 100, 300, [220, 180, 60]]
].map(([name, width, height, color]) => ({name, mimeType: "image/png", buffer: png(width, height, color)}))

/** Wait until an image has this caption. */
const captioned = (page, text) =>
	page.waitForFunction(
		wanted => [...document.querySelectorAll(".train-caption")].some(each => each.value === wanted),
		text
	)

/** A parameter of the address. */
const param = (page, name) => new URL(page.url().replace("/#/", "/")).searchParams.get(name)

export function flow({test, assert, api, ended, violations, shot}) {
	const looks = async (page, name) => {
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({colorScheme: scheme, reducedMotion: "reduce"})
			for (const width of [360, 1280, 3840]) {
				await page.setViewportSize({width, height: Math.min(2160, Math.max(740, width * 0.6))})
				await page.waitForFunction(most => innerWidth === most && document.documentElement.scrollWidth <= most, width)
				if (width < 3840) assert.deepEqual(await violations(page), [], `${name}, ${scheme}, ${width}`)
				await shot(page, `train-${name}-${width}-${scheme}`)
			}
		}
		await page.setViewportSize({width: 1280, height: 800})
	}

	test(
		"from images to a LoRA in a prompt: captions, crops, check, run, pause, resume, use",
		async page => {
			await page.goto("/#/train")
			await page.getByRole("heading", {name: "Examples"}).waitFor()
			await looks(page, "home")
			const caption = {name: "wide.txt", mimeType: "text/plain", buffer: Buffer.from("a wide thing, blue")}
			const broken = {name: "broken.png", mimeType: "image/png", buffer: Buffer.from("junk")}
			await page.locator("main input[type=file]").setInputFiles([...FILES, caption, broken])
			await page.getByRole("textbox", {name: "Caption of green -pear"}).waitFor()
			const reason = "broken.png: not an image that can be read: not PNG, JPEG, WEBP or BMP"
			await page.getByText(reason, {exact: true}).waitFor()
			await page.getByRole("button", {name: "Dismiss"}).click()
			assert.equal(await page.getByRole("textbox", {name: "Caption of wide"}).inputValue(), "a wide thing, blue")
			// how each is cropped, from the trainer
			await page.getByRole("heading", {name: "128 × 128 · 2 images"}).waitFor()
			await page.getByRole("heading", {name: "160 × 96 · 1 image"}).waitFor()
			await page.locator(".train-card", {hasText: "17% cropped"}).waitFor()

			// captions, in place and all at once, and back
			const apple = page.getByRole("textbox", {name: "Caption of red apple"})
			await apple.fill("an apple, red")
			await apple.blur()
			await page.getByText("Edit all captions").click()
			await page.getByLabel("Prepend to every caption").fill("drawing of")
			await page.getByLabel("Separator").selectOption("Space")
			await page.getByRole("button", {name: "Change 4 captions"}).click()
			await captioned(page, "drawing of an apple, red")
			await page.getByRole("button", {name: /^blue 1/}).click()
			await page.getByRole("button", {name: "Change 1 caption", exact: true}).click()
			await captioned(page, "drawing of a wide thing")
			await page.getByRole("radio", {name: "Replace"}).check()
			await page.getByLabel("Text to replace").fill("drawing")
			await page.getByLabel("Replace with").fill("photo")
			await page.getByRole("button", {name: "Change 4 captions"}).click()
			await captioned(page, "photo of a wide thing")
			await page.getByRole("button", {name: "Undo: Replace"}).click()
			await captioned(page, "drawing of a wide thing")
			await page.getByRole("radio", {name: "Suffix"}).check()
			await page.getByLabel("Append to every caption").fill("flat colors")
			await page.getByLabel("Separator").selectOption("Comma")
			await page.getByRole("button", {name: "Change 4 captions"}).click()
			await captioned(page, "drawing of a wide thing, flat colors")
			await page.getByRole("button", {name: "Undo: Suffix"}).click()
			await captioned(page, "drawing of a wide thing")
			await page.getByText("start the worker with --captioner FOLDER").waitFor()
			const id = param(page, "dataset")
			const stored = await api(`/v1/datasets/${id}`)
			assert.deepEqual(stored.pictures.map(each => each.caption).sort(), [
				"drawing of",
				"drawing of",
				"drawing of a wide thing",
				"drawing of an apple, red"
			])

			// the check before anything starts
			await page.getByLabel("LoRA name").fill("stripes")
			await page.getByLabel("Trigger word").fill("strp")
			await page.getByText("More settings").click()
			await page.getByLabel("Steps", {exact: true}).fill("400")
			await page.getByLabel("Rank").fill("2")
			await page.getByLabel("Batch size").fill("1")
			await page.getByLabel("Checkpoint every").fill("3")
			await page.getByLabel("Sample every").fill("3")
			await page.getByLabel("Sample prompts").fill("strp, drawing of an apple --w 64 --h 64 --s 2")
			// checked while one edits; a problem is one click away, and its report gets the focus
			await page.getByLabel("Learning rate", {exact: true}).fill("-1")
			await page.getByRole("button", {name: "1 problem: show"}).click({timeout: 300_000})
			assert.match(await page.evaluate(() => document.activeElement.textContent), /learning_rate/)
			await page.getByLabel("Learning rate", {exact: true}).fill("")
			await page.getByText("Ready to start.").waitFor({timeout: 300_000})
			await page.getByText(/GB of .* \(cpu\)/).waitFor()
			await looks(page, "desk")
			const {jobs} = await api("/v1/jobs?limit=200")
			assert.ok(!jobs.some(job => job.settings.name === "stripes"), "nothing starts before it is asked for")
			await page.getByRole("button", {name: "Start training"}).click()

			// the run: loss, samples, a checkpoint that is used at once
			await page.getByRole("heading", {name: "stripes", level: 1}).waitFor()
			await page.getByRole("img", {name: /Running average of the loss/}).waitFor({timeout: 300_000})
			await page.getByRole("button", {name: "Use now"}).waitFor({timeout: 300_000})
			await page
				.getByRole("img", {name: /after step/})
				.first()
				.waitFor({timeout: 300_000})
			const job = param(page, "job")
			await page.reload() // the stream is joined again, with everything so far
			await page.getByRole("button", {name: "Use step 6"}).waitFor({timeout: 300_000})
			await page.getByRole("button", {name: "Pause"}).click()
			await ended(job)
			await page.getByText("paused", {exact: true}).waitFor()
			await looks(page, "run")
			await page.getByRole("button", {name: "Step 3", exact: true}).click()
			await page.getByRole("img", {name: /, after step 3$/}).waitFor()
			await page.locator(".train-best .badge").waitFor()
			await page.getByRole("img", {name: "A sample after step 3"}).waitFor()
			// the samples as a time-lapse, from the one that is shown to the last
			await page.getByRole("button", {name: "Play the samples as a time-lapse"}).click()
			await page.getByRole("img", {name: /, after step 6$/}).waitFor()
			await page.getByRole("button", {name: "Resume"}).click()
			await page.getByText("training", {exact: true}).waitFor()
			await page.waitForFunction(old => !location.hash.includes(old), job)
			const second = param(page, "job")
			await page.getByRole("img", {name: /Running average of the loss: .* at step 2,/}).waitFor({timeout: 300_000})
			await page.getByRole("button", {name: "Use step 3"}).waitFor({timeout: 300_000})
			await page.getByRole("button", {name: "Pause"}).click()
			assert.equal((await ended(second)).state, "cancelled")
			await page.getByRole("button", {name: "Train longer"}).waitFor()
			await page.getByRole("button", {name: "Use now"}).click()
			await page.waitForURL(/#\/generate/)
			const prompt = page.getByRole("textbox", {name: "Prompt", exact: true})
			await page.waitForFunction(() => /<lora:stripes-\d+:1>/.test(document.querySelector("textarea")?.value ?? ""))
			assert.match(await prompt.inputValue(), /^strp, drawing of an apple <lora:stripes-\d{6}:1>$/)
			const {loras} = await api("/v1/loras?query=stripes")
			assert.equal(loras.length, 1)
		},
		{expected: /400 \(Bad Request\)/}
	)

	test("shapes are drawn and stamped, and become a dataset", async page => {
		await page.goto("/#/train")
		await page.getByRole("button", {name: "Draw shapes"}).click()
		const dialog = page.getByRole("dialog", {name: "Draw a dozen shapes"})
		const box = await dialog.locator("canvas").boundingBox()
		await page.mouse.move(box.x + 40, box.y + 40)
		await page.mouse.down()
		await page.mouse.move(box.x + 150, box.y + 120, {steps: 5})
		await page.mouse.up()
		await dialog.getByRole("button", {name: "star"}).click()
		assert.deepEqual(await violations(page), [])
		await shot(page, "train-pad")
		await dialog.getByRole("button", {name: "Undo"}).click()
		await dialog.getByRole("img", {name: "Your drawing, 1 stroke"}).waitFor()
		await dialog.getByRole("button", {name: "Add drawing 1"}).click()
		await dialog.getByText("1 of 12 drawings").waitFor()
		await dialog.getByRole("button", {name: "circle"}).press("Enter")
		await dialog.getByRole("button", {name: "Add drawing 2"}).press("Enter")
		await dialog.getByText("2 of 12 drawings").waitFor()
		await page.setViewportSize({width: 360, height: 740})
		assert.ok((await page.evaluate(() => document.documentElement.scrollWidth)) <= 360)
		await shot(page, "train-pad-phone")
		await dialog.getByRole("button", {name: "Done"}).click()
		await page.getByText("2 images", {exact: true}).waitFor()
		const id = param(page, "dataset")
		const {pictures} = await api(`/v1/datasets/${id}`)
		assert.deepEqual(pictures.map(each => each.caption).sort(), ["a drawing of a circle", "a drawing of a sun"])
		await page.getByRole("button", {name: "Delete this dataset"}).click()
		await page.getByRole("dialog").getByRole("button", {name: "Delete"}).click()
		await page.getByRole("heading", {name: "Train", level: 1}).waitFor()
		assert.ok((await api(`/v1/datasets/${id}`)).error)
	})

	test("a folder is dropped: its images with the captions beside them, whatever their names", async (page, context) => {
		const folder = mkdtempSync(join(tmpdir(), "page-"))
		try {
			for (const [name, width] of [
				["circles", 128],
				["squares", 160]
			]) {
				mkdirSync(join(folder, name))
				writeFileSync(join(folder, name, "one.png"), png(width, 128, [90, 120, width]))
				writeFileSync(join(folder, name, "one.txt"), `one of the ${name}`)
			}
			writeFileSync(join(folder, ".hidden"), "")
			writeFileSync(join(folder, "notes.json"), "{}")
			writeFileSync(join(folder, "alone.txt"), "a caption without an image")
			await page.goto("/#/train")
			const {x, y} = await page.locator(".dropzone").boundingBox()
			const mouse = await context.newCDPSession(page)
			for (const type of ["dragEnter", "dragOver", "drop"])
				await mouse.send("Input.dispatchDragEvent", {
					type,
					x: x + 20,
					y: y + 20,
					data: {items: [], files: [folder], dragOperationsMask: 1}
				})
			await page.getByText("2 images", {exact: true}).waitFor()
			await captioned(page, "one of the circles")
			await captioned(page, "one of the squares")
			await page.getByText("notes.json: skipped: not an image or a caption").waitFor()
			await page.getByText("alone.txt: no image of the same name was dropped with it").waitFor()
			const {pictures} = await api(`/v1/datasets/${param(page, "dataset")}`)
			const captions = Object.fromEntries(pictures.map(({width, caption}) => [width, caption]))
			assert.deepEqual(captions, {128: "one of the circles", 160: "one of the squares"})
		} finally {
			rmSync(folder, {recursive: true})
		}
	})

	test("a first run on stamps, to its end, then longer, then used", async page => {
		await page.goto("/#/train")
		await page.getByRole("button", {name: "Draw shapes"}).click()
		const dialog = page.getByRole("dialog", {name: "Draw a dozen shapes"})
		for (const [index, name] of ["circle", "square", "star", "flower"].entries()) {
			await dialog.getByRole("button", {name, exact: true}).click()
			await dialog.getByRole("button", {name: `Add drawing ${index + 1}`}).click()
			await dialog.getByText(`${index + 1} of 12 drawings`).waitFor()
		}
		await dialog.getByRole("button", {name: "Done"}).click()
		await page.getByText("4 images", {exact: true}).waitFor()
		assert.equal(await page.getByLabel("Preset").inputValue(), "quick")
		await page.getByLabel("LoRA name").fill("stamps")
		await page.getByText("More settings").click()
		for (const [name, value] of [
			["Steps", "2"],
			["Rank", "2"],
			["Batch size", "1"],
			["Sample every", "0"]
		])
			await page.getByLabel(name, {exact: name === "Steps"}).fill(value)
		await page.getByRole("button", {name: "Start training"}).click({timeout: 300_000})
		await page.getByText("done", {exact: true}).waitFor({timeout: 300_000})
		const first = param(page, "job")
		await page.getByRole("button", {name: "Train longer"}).click()
		const longer = page.getByRole("dialog", {name: "Train longer"})
		await longer.getByText("2 steps are done").waitFor()
		await longer.getByLabel("Total steps").fill("4")
		assert.deepEqual(await violations(page), [])
		await shot(page, "train-extend")
		await longer.getByRole("button", {name: "Train longer"}).click()
		await page.waitForFunction(old => !location.hash.includes(old), first)
		await page.getByText("done", {exact: true}).waitFor({timeout: 300_000})
		const job = await api(`/v1/jobs/${param(page, "job")}`)
		assert.deepEqual([job.run, job.settings.steps], [first, 4])
		await page.getByRole("img", {name: /Running average of the loss: .* at step 1, .* at step 4,/}).waitFor()
		await page.getByRole("button", {name: "Use now"}).click()
		await page.waitForFunction(() =>
			/^a drawing of a \w+ <lora:stamps-2:1>$/.test(document.querySelector("textarea")?.value ?? "")
		)
		await page.locator(".lora-card[aria-pressed=true]", {hasText: "stamps-2"}).waitFor()
	})
}
