// Drives the page in one browser: node tests/page/run.mjs ADDRESS [--only TEXT] [--shots FOLDER]
//
// A flow is a file in flows/ that exports `flow(tools)` and calls `tools.test(name, async (page) => ...)`. Each test gets a
// fresh context (no storage, no cookies); what a page reports as an error fails its test. Prints one JSON line per test.
// Lines {"ask": "restart"} go to whoever started this, who answers with one line when it is done.
import assert from "node:assert/strict";
import { mkdirSync, readdirSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import { chromium } from "playwright-core";

const SWITCHES = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const [address, ...options] = process.argv.slice(2);
const option = (name) => (options.includes(name) ? options[options.indexOf(name) + 1] : undefined);
const only = option("--only");
const shots = option("--shots");
if (shots) mkdirSync(shots, { recursive: true });

const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
/** Ask whoever started this to do something to the worker. */
async function ask(what) {
  console.log(JSON.stringify({ ask: what }));
  return JSON.parse((await answers.next()).value ?? "null");
}

const axe = readFileSync(new URL("../../node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
/** Violations of WCAG 2.2 AA as [rule, element] pairs. */
async function violations(page) {
  await page.evaluate(axe); // by the debugger: the page's own policy stays as it is
  return page.evaluate(async () => {
    const tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"];
    const { violations } = await window.axe.run(document, { runOnly: { type: "tag", values: tags } });
    return violations.flatMap(({ id, nodes }) =>
      nodes.map((node) => `${id}: ${node.html.slice(0, 160)} ${node.any[0]?.message ?? ""}`),
    );
  });
}

/** The JSON of a call to the worker's API. */
async function api(path, json, method) {
  const response = await fetch(address + path, {
    method: method ?? (json === undefined ? "GET" : "POST"),
    body: json === undefined ? undefined : JSON.stringify(json),
    headers: json === undefined ? {} : { "Content-Type": "application/json" },
  });
  return response.json();
}

const submit = async (fields) => (await api("/v1/jobs", { prompt: "a red apple", steps: 2, seed: 7, ...fields })).id;

async function ended(job) {
  for (;;) {
    const document = await api(`/v1/jobs/${job}`);
    if (["done", "failed", "cancelled"].includes(document.state)) return document;
    await new Promise((resolve) => setTimeout(resolve, 80));
  }
}

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: SWITCHES });
const tests = [];
for (const file of readdirSync(new URL("flows/", import.meta.url)).sort()) {
  if (!file.endsWith(".mjs")) continue;
  const { flow } = await import(new URL(`flows/${file}`, import.meta.url));
  const test = (name, run, settings = {}) =>
    tests.push({ name: `${file.replace(".mjs", "")}: ${name}`, run, settings });
  flow({ test, assert, address, api, submit, ended, ask, violations, browser, shot });
}

/** A picture of the page for people to look at, where a folder was named. */
async function shot(page, name) {
  if (shots) await page.screenshot({ path: `${shots}/${name}.png` });
}

let failures = 0;
for (const { name, run, settings } of tests) {
  if (only && !name.includes(only)) continue;
  const started = Date.now();
  const reports = [];
  const context = await browser.newContext({
    viewport: { width: 1280, height: 800 },
    baseURL: address,
    ...settings.context,
  });
  context.setDefaultTimeout(60_000);
  const watch = (page) => {
    page.on("pageerror", (error) => reports.push(String(error.stack ?? error)));
    page.on("dialog", (dialog) => {
      reports.push(`dialog: ${dialog.message()}`);
      dialog.dismiss();
    });
    page.on("console", (message) => {
      const expected = settings.expected?.test(message.text()) || /503 \(Service Unavailable\)/.test(message.text());
      if (message.type() === "error" && !expected) reports.push(`console: ${message.text()}`);
    });
  };
  context.on("page", watch);
  const page = await context.newPage();
  let error = null;
  try {
    await run(page, context);
    assert.deepEqual(reports, [], "the page reported errors");
  } catch (caught) {
    error = [String(caught.stack ?? caught), ...reports].join("\n");
    failures += 1;
    if (shots) await page.screenshot({ path: `${shots}/failed-${failures}.png` }).catch(() => {});
  }
  await context.close();
  console.log(JSON.stringify({ name, error, seconds: (Date.now() - started) / 1000 }));
}
await browser.close();
process.exit(failures ? 1 : 0);
