// The frame around every view.
const VIEWS = ["generate", "compare", "edit", "library", "queue"];

export function flow({ test, assert, violations, shot, timed }) {
	test("every view opens, in light and dark, without a violation of WCAG AA", async (page) => {
		for (const scheme of ["light", "dark"]) {
			await page.emulateMedia({ colorScheme: scheme, reducedMotion: "reduce" });
			for (const view of VIEWS) {
				await page.goto(`/#/${view}`);
				await page.locator(`main.view-${view} > *`).first().waitFor();
				assert.deepEqual(await violations(page), [], `${view}, ${scheme}`);
				await shot(page, `${view}-${scheme}`);
			}
		}
	});

	test("nothing is wider than a phone", async (page) => {
		await page.setViewportSize({ width: 360, height: 740 });
		for (const view of VIEWS) {
			await page.goto(`/#/${view}`);
			await page.locator(`main.view-${view} > *`).first().waitFor();
			const width = await page.evaluate(() => document.documentElement.scrollWidth);
			assert.ok(width <= 360, `${view} is ${width} pixels wide`);
			await shot(page, `${view}-phone`);
		}
	});

	test(
		"the first paint is within a second, and nothing shifts",
		async (page) => {
			await page.addInitScript(() => {
				window.shift = 0;
				window.moved = [];
				window.shifts = new PerformanceObserver((list) => window.count(list.getEntries()));
				window.count = (entries) => {
					for (const entry of entries) {
						if (entry.hadRecentInput) continue;
						window.shift += entry.value;
						for (const { node, previousRect: was, currentRect: is } of entry.sources)
							window.moved.push(
								`${(node?.outerHTML ?? node?.textContent ?? "").slice(0, 80)} y ${was.y} to ${is.y}, x ${was.x} to ${is.x}`,
							);
					}
				};
				window.shifts.observe({ type: "layout-shift", buffered: true });
			});
			const paints = [];
			const fast = () => paints.some((paint) => paint < 1000);
			for (let visit = 0; visit < (timed ? 8 : 2) && !fast(); visit += 1) {
				await page.goto("about:blank"); // the best visit counts
				await page.goto("/#/generate");
				await page.locator(".lora-card").first().waitFor();
				await page.waitForFunction(() => performance.getEntriesByName("first-contentful-paint").length);
				await page.waitForFunction(() =>
					[...document.images].every((each) => each.complete || each.loading === "lazy"),
				);
				const { paint, shift, moved } = await page.evaluate(async () => {
					await document.fonts.ready;
					for (let frame = 0; frame < 10; frame += 1) await new Promise(requestAnimationFrame);
					window.count(window.shifts.takeRecords());
					return {
						paint: performance.getEntriesByName("first-contentful-paint")[0].startTime,
						shift: window.shift,
						moved: window.moved,
					};
				});
				assert.ok(shift < 0.01, `layout shift of ${shift}\n${moved.join("\n")}`);
				paints.push(paint);
			}
			if (timed) assert.ok(fast(), `first paint after ${paints} ms`);
		},
		{ alone: true },
	);

	test("keys lead to views, and ? lists them", async (page) => {
		await page.goto("/");
		await page.locator(".rail-link").first().waitFor();
		await page.keyboard.press(String(VIEWS.length));
		await page.waitForURL("**/#/queue");
		await page.keyboard.press("?");
		const sheet = page.getByRole("dialog", { name: "Keyboard shortcuts" });
		await sheet.getByText("Go to Library").waitFor();
		await page.keyboard.press("Escape");
		await sheet.waitFor({ state: "detached" });
		await page.keyboard.press("t");
		assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "light");
	});
}
