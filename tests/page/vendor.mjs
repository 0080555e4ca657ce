// Copies the modules and fonts that the page ships from node_modules, so that they are exactly what npm published.
// `npm run vendor` writes them; `node tests/page/vendor.mjs --check` fails where a copy differs.
import { mkdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";

const page = new URL("../../src/inweave/serve/page/", import.meta.url);
const modules = new URL("../../node_modules/", import.meta.url);
/** @type {[from: string, to: string, edit?: (text: string) => string][]} */
const COPIES = [
  ["preact/dist/preact.mjs", "vendor/preact.js"],
  // a bare name needs an import map, which the security policy forbids
  ["preact/hooks/dist/hooks.mjs", "vendor/hooks.js", (text) => text.replace('from"preact"', 'from"./preact.js"')],
  ["htm/dist/htm.module.js", "vendor/htm.js"],
  ["preact/LICENSE", "vendor/LICENSE-preact"],
  ["htm/LICENSE", "vendor/LICENSE-htm"],
  ["@fontsource-variable/instrument-sans/files/instrument-sans-latin-wght-normal.woff2", "fonts/instrument-sans.woff2"],
  ["@fontsource/instrument-serif/files/instrument-serif-latin-400-normal.woff2", "fonts/instrument-serif.woff2"],
  ["@fontsource-variable/instrument-sans/LICENSE", "fonts/LICENSE-instrument-sans"],
  ["@fontsource/instrument-serif/LICENSE", "fonts/LICENSE-instrument-serif"],
];

const check = process.argv.includes("--check");
const different = [];
for (const [from, to, edit] of COPIES) {
  const content = readFileSync(new URL(from, modules));
  const expected = edit
    ? Buffer.from(edit(content.toString("utf8")))
    : Buffer.from(content.toString("latin1").replace(/\n?\/\/# sourceMappingURL=\S+\s*$/, ""), "latin1");
  const final = edit
    ? Buffer.from(expected.toString("utf8").replace(/\n?\/\/# sourceMappingURL=\S+\s*$/, ""))
    : expected;
  const target = new URL(to, page);
  if (check) {
    if (!readFileSync(target).equals(final)) different.push(to);
  } else {
    mkdirSync(dirname(target.pathname), { recursive: true });
    writeFileSync(target, final);
  }
}
if (different.length) {
  console.error(`not what npm published: ${different.join(", ")}; run npm run vendor`);
  process.exit(1);
}
