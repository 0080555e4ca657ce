// Copies the modules that the page ships from node_modules, so that they are exactly what npm published.
// `npm run vendor` writes them; `node tests/page/vendor.mjs --check` fails where a copy differs. Fonts are cut down by
// tools/page_fonts.py; of them the digests are compared.
import {createHash} from "node:crypto"
import {mkdirSync, readFileSync, writeFileSync} from "node:fs"
import {dirname} from "node:path"

const page = new URL("../../src/inweave/serve/page/", import.meta.url)
const modules = new URL("../../node_modules/", import.meta.url)
const COPIES = [
	["htm/preact/standalone.module.js", "vendor/preact.js"], // Preact with its hooks and htm in one module
	["preact/LICENSE", "vendor/LICENSE-preact"],
	["htm/LICENSE", "vendor/LICENSE-htm"],
	["@fontsource/instrument-serif/LICENSE", "fonts/LICENSE-instrument-serif"]
]

const check = process.argv.includes("--check")
const different = []
for (const [from, to] of COPIES) {
	const final = readFileSync(new URL(from, modules))
	const target = new URL(to, page)
	if (check) {
		if (!readFileSync(target).equals(final)) different.push(to)
	} else {
		mkdirSync(dirname(target.pathname), {recursive: true})
		writeFileSync(target, final)
	}
}
const digest = url => createHash("sha256").update(readFileSync(url)).digest("hex")
const fonts = JSON.parse(readFileSync(new URL("fonts.json", import.meta.url), "utf8"))
for (const [name, font] of Object.entries(fonts)) {
	const same = digest(new URL(font.from, modules)) === font.from_sha256 && digest(new URL(name, page)) === font.sha256
	if (!same) different.push(`${name} (tools/page_fonts.py)`)
}
if (different.length) {
	console.error(`not what npm published: ${different.join(", ")}; run npm run vendor`)
	process.exit(1)
}
