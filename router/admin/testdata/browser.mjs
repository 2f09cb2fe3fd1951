// Checks the console in a browser. TestConsoleInBrowser runs it, with the addresses in the
// environment; see there for the router and its traffic.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { chromium } from "playwright-core";

const { CHROMIUM, SHOTS, ONLY, CONTROL, CONSOLE, COMPARED, TOKEN } = process.env;
const axeSource = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const PATIENCE = 30_000; // ms for what a loaded machine may take

const control = async (path, body) => {
  const r = await fetch(CONTROL + path, { method: "POST", body });
  assert.ok(r.ok, `${path}: ${r.status} ${await r.clone().text()}`);
};
const api = async (path, method = "GET") => {
  const r = await fetch(CONSOLE + path, { method, headers: { Authorization: `Bearer ${TOKEN}` } });
  assert.ok(r.ok, `${path}: ${r.status}`);
  return r.json();
};
const stateOf = async id => (await api("/admin/v1/workers")).workers.find(w => w.id === id).state;

const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"] });
const faults = []; // what no page may do
let expected = []; // patterns of faults that the current check causes on purpose

// open opens a page in a context of its own, so that it has no token yet.
async function open(hash, { width = 1280, colorScheme = "light", base = CONSOLE } = {}) {
  const context = await browser.newContext({ viewport: { width, height: width < 500 ? 844 : 900 }, colorScheme, reducedMotion: "no-preference" });
  const page = await context.newPage();
  page.setDefaultTimeout(PATIENCE);
  const fault = text => { if (!expected.some(e => e.test(text))) faults.push(text); };
  page.on("console", m => { if (["error", "warning"].includes(m.type())) fault(`console: ${m.text()}`); });
  page.on("pageerror", e => fault(`page error: ${e.stack}`));
  page.on("response", r => { if (r.status() >= 400) fault(`status ${r.status()}: ${r.url()}`); });
  page.on("request", r => { if (!r.url().startsWith(`${base}/`) && !r.url().startsWith("data:")) fault(`request to ${r.url()}`); });
  await page.goto(`${base}/${hash}`);
  return page;
}

const signedIn = (hash, options) => open(`#token=${TOKEN}${hash ? `&${hash}` : ""}`, options);
// close ends the routes of a page first: an update that one of them is fetching would otherwise end this process.
const close = async page => {
  await page.unrouteAll({ behavior: "ignoreErrors" });
  await page.context().close();
};
const title = (page, text) => page.locator(".view-title", { hasText: text }).waitFor();
// rows returns the first cells of a table's rows.
const rows = (page, label) => page.locator(`[aria-label="${label}"] tbody tr td:first-child`).allTextContents();

// visit changes the view of an open page.
async function visit(page, hash, sign) {
  await page.evaluate(h => { document.querySelector(".view-title").dataset.old = ""; location.hash = h; }, hash);
  await page.locator(".view-title:not([data-old])").waitFor();
  await page.locator(sign).first().waitFor();
}

// until waits for a condition on the page or the router.
async function until(what, f) {
  const end = Date.now() + PATIENCE;
  for (;;) {
    if (await f()) return;
    assert.ok(Date.now() < end, `not within ${PATIENCE} ms: ${what}`);
    await new Promise(done => setTimeout(done, 100));
  }
}

async function axe(page, what) {
  await page.evaluate(axeSource); // evaluated by the browser's debugger, to which the page's policy does not apply
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
  assert.deepEqual(violations.map(v => `${v.id}: ${v.nodes.map(n => `${n.html.slice(0, 160)} (${n.failureSummary.slice(0, 300)})`).join("; ")}`), [], `axe of ${what}`);
}

const DECODE = "llama-70b-decode-rack2-node11";
const PREFILL = "llama-70b-prefill-rack1-node07";

async function streamed() {
  const { requests } = (await api("/admin/v1/status?parts=requests&model=sim&outcome=ok&limit=100")).requests;
  return requests.find(q => q.stream && q.prefill && q.timeline);
}

// VIEWS has every view and the element that shows that it has its data.
const VIEWS = [
  ["overview", async () => "", '[data-column=prefill] .node'],
  ["requests", async () => "view=requests", '[aria-label="Requests"] tbody tr'],
  ["requests-filtered", async () => "view=requests&model=broken&outcome=failed", '[aria-label="Requests"] tbody tr'],
  ["request", async () => `view=request&id=${(await streamed()).id}`, ".waterfall tbody tr"],
  ["workers", async () => "view=workers", '[aria-label="Workers"] tbody tr'],
  ["worker", async () => `view=worker&id=${DECODE}`, '[aria-label="Ranks"] tbody tr'],
  ["models", async () => "view=models", '[aria-label="Models"] tbody tr'],
  ["model", async () => "view=model&id=sim", '[aria-label="Workers of the model"] tbody tr'],
  ["keys", async () => "view=keys", '[aria-label="API keys"] tbody tr'],
  ["key", async () => "view=key&id=team-a", '[aria-label="Latest requests of the key"] tbody tr'],
  ["queues", async () => "view=queues", ".view-title"],
];

// walk presses the Tab key through a view of a paused page.
async function walk(page, width, [name, hash, sign]) {
  await visit(page, await hash() || "view=overview", sign);
  // What can have the focus, in the order of the document; a radio of a group or what is hidden cannot.
  const want = await page.evaluate(() => [...document.querySelectorAll("a[href], button, input, select, [tabindex='0']")]
    .filter(e => e.checkVisibility() && !e.disabled).map((e, i) => { e.dataset.stop = i; return i; }));
  assert.ok(want.length > 5, `${name}: ${want.length} controls`);
  await page.locator(".skip").focus();
  const got = [0];
  for (let i = 0; i < want.length + 3; i++) {
    await page.keyboard.press("Tab");
    const at = await page.evaluate(() => {
      const e = document.activeElement;
      if (e === document.body || !e.dataset.stop) return null;
      const s = getComputedStyle(e);
      return { stop: +e.dataset.stop, visible: e.matches(":focus-visible") && s.outlineStyle !== "none" && parseFloat(s.outlineWidth) > 0, html: e.outerHTML.slice(0, 120) };
    });
    if (!at || at.stop === 0) break; // beyond the last one
    assert.ok(at.visible, `${name}: the focus is not visible on ${at.html}`);
    got.push(at.stop);
  }
  assert.deepEqual(got, want, `${name}, ${width} px: the order of the Tab key`);
}

const checks = {
  // Each view, at two widths, light and dark: no finding of axe, no scrolling sideways, and every
  // name of a worker in full.
  async "views are accessible and fit"() {
    for (const colorScheme of ["light", "dark"]) for (const width of [1280, 390]) {
      const page = await signedIn("", { width, colorScheme });
      await title(page, "Overview");
      for (const [name, hash, sign] of VIEWS) {
        if (name === "overview") await control("/requests?n=5"); // a chart shows the last 10 s
        await visit(page, await hash() || "view=overview", sign);
        if (name === "overview") await until("the charts have data", async () => (await page.locator(".plot").first().getAttribute("aria-label")).includes("%"));
        const what = `${name}, ${width} px, ${colorScheme}`;
        await axe(page, what);
        const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert.ok(over <= 0, `${what}: the page is ${over} px wider than the screen`);
        const cut = await page.evaluate(() => [...document.querySelectorAll(".node .name, h2")].filter(e => e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline").map(e => e.textContent));
        assert.deepEqual(cut, [], `${what}: names are cut off`);
        if (SHOTS) await page.screenshot({ path: `${SHOTS}/${name}-${width}-${colorScheme}.png`, fullPage: true });
      }
      await close(page);
    }
  },

  // The longest id that is accepted, and a model's name with markup: every view fits, and the name stays text.
  async "the longest names fit and stay text"() {
    const id = `A-z.0_9:@${"y".repeat(119)}`, model = `<img src=x onerror=alert(1)>${"模".repeat(150)}`;
    for (const width of [1280, 390]) {
      const page = await signedIn("view=models", { width });
      await title(page, "Models");
      await page.route("**/admin/v1/status?*", async route => {
        const text = await (await route.fetch()).text();
        await route.fulfill({ contentType: "application/json", body: text.replaceAll(DECODE, id).replaceAll('"small"', JSON.stringify(model)) });
      });
      const seen = { id: 0, model: 0 };
      for (const [name, hash, sign] of VIEWS) {
        await visit(page, await hash() || "view=overview", sign);
        const found = await page.evaluate(() => ({ over: document.documentElement.scrollWidth - innerWidth, images: document.images.length, text: document.body.textContent }));
        assert.ok(found.over <= 0, `${name}, ${width} px: the page is ${found.over} px wider than the screen`);
        assert.equal(found.images, 0, `${name}: markup in a name became an element`);
        seen.id += found.text.includes(id);
        seen.model += found.text.includes(model);
      }
      assert.ok(seen.id >= 5 && seen.model >= 2, `${width} px: the names are on ${JSON.stringify(seen)} views`);
      await close(page);
    }
  },

  async "the token leaves the address and links restore the view"() {
    const page = await signedIn("view=requests&model=broken&outcome=failed");
    await title(page, "Requests");
    assert.equal(new URL(page.url()).hash, "#view=requests&model=broken&outcome=failed");
    const link = page.url();
    await close(page);
    const other = await open(new URL(link).hash); // without a token: the page asks for it
    await other.getByLabel("Admin token").fill(TOKEN);
    await other.getByRole("button", { name: "Open" }).click();
    await title(other, "Requests");
    await until("the filters are those of the link", async () => await other.getByLabel("Model").inputValue() === "broken" && await other.getByLabel("Outcome").inputValue() === "failed");
    await until("the list is filtered", async () => {
      const shown = await rows(other, "Requests");
      const { requests } = (await api("/admin/v1/status?parts=requests&model=broken&outcome=failed")).requests;
      return shown.length > 0 && shown.join() === requests.map(q => q.id).join();
    });
    // History: a view, its link to a model, back.
    await other.getByRole("link", { name: "Models" }).click();
    await title(other, "Models");
    assert.equal(await other.title(), "Models · Sluice");
    await other.getByRole("link", { name: "small", exact: true }).click();
    await title(other, "Model small");
    await other.goBack();
    await title(other, "Models");
    await other.goBack();
    await title(other, "Requests");
    assert.equal(await other.getByLabel("Model").inputValue(), "broken");
    await close(other);
    const id = (await streamed()).id, old = await open(`#token=${TOKEN}&why=${id}`); // the former form
    await title(old, `Request ${id}`);
    assert.equal(new URL(old.url()).hash, `#view=request&id=${id}`);
    await close(old);
  },

  async "a wrong token is refused"() {
    expected = [/401/];
    const page = await open("#token=wrong-wrong-wrong-wrong");
    await page.getByText("This router does not accept the token").waitFor();
    await page.getByLabel("Admin token").fill(TOKEN);
    await page.keyboard.press("Enter");
    await title(page, "Overview");
    await close(page);
  },

  async "filters select what the API selects"() {
    const page = await signedIn("view=requests");
    await title(page, "Requests");
    const { requests: all } = (await api("/admin/v1/status?parts=requests&limit=500")).requests;
    const slow = all.map(q => q.ttft_ms || q.total_ms).toSorted((a, b) => a - b)[Math.floor(all.length / 2)];
    const cases = [
      [["Model", "small"], "model=small", q => q.model === "small"],
      [["Outcome", "rejected"], "outcome=rejected", q => q.status === 404],
      [["API key", "team-b"], "key=team-b", q => q.key === "team-b"],
      [["Class", "batch"], "class=batch", q => q.class === "batch" && q.model === "small"],
      [["Tenant", "team-b"], "tenant=team-b", q => q.tenant === "team-b"],
      [["Worker", DECODE], `worker=${DECODE}`, q => q.decode === `${DECODE}/0`],
      [["Worker", `${PREFILL}/0`], `worker=${PREFILL}/0`, q => q.prefill === `${PREFILL}/0`],
      [["Slower than, ms", String(slow)], `slow_ms=${slow}`, q => (q.ttft_ms || q.total_ms) >= slow],
    ];
    for (const [[label, value], query, accepts] of cases) {
      const field = page.getByLabel(label);
      if (await field.evaluate(e => e.tagName) === "SELECT") await field.selectOption(value); else await field.fill(value);
      const { requests } = (await api(`/admin/v1/status?parts=requests&limit=100&${query}`)).requests;
      assert.ok(requests.length > 0 && requests.length < all.length, `${query}: ${requests.length} of ${all.length}`);
      assert.ok(requests.every(accepts), `${query}: ${JSON.stringify(requests.find(q => !accepts(q)))}`);
      await until(`the page shows ${query}`, async () => (await rows(page, "Requests")).join() === requests.map(q => q.id).join());
      const member = query.split("=")[0].replace("slow_ms", "slow");
      assert.equal(new URLSearchParams(new URL(page.url()).hash.slice(1)).get(member), value);
      await page.getByRole("button", { name: "Clear filters" }).click();
      await until("the filters are cleared", async () => (await rows(page, "Requests")).length === Math.min(all.length, 100));
    }
    await page.getByLabel("Model").selectOption("sim"); // two at once
    await page.getByLabel("API key").selectOption("team-b");
    const { requests } = (await api("/admin/v1/status?parts=requests&limit=100&model=sim&key=team-b")).requests;
    await until("the page shows both", async () => (await rows(page, "Requests")).join() === requests.map(q => q.id).join());
    await page.getByLabel("Outcome").selectOption("migrated");
    await page.getByText("no request matches").waitFor();
    await close(page);
  },

  // Each part of the waterfall has the names, the times and the place of the API's spans.
  async "the waterfall is the timeline of the API"() {
    const { id } = await streamed();
    const line = await api(`/admin/v1/timeline?id=${id}`);
    for (const name of ["tokenize", "choose", "prefill leg", "decode leg", "stream"]) assert.ok(line.spans.some(s => s.name === name), `no ${name} in ${JSON.stringify(line.spans)}`);
    const page = await signedIn(`view=request&id=${id}`);
    await page.locator(".waterfall tbody tr").first().waitFor();
    const fine = v => v >= 100 ? Math.round(v).toLocaleString("en") : v >= 10 ? v.toFixed(1) : v.toFixed(2);
    const shown = await page.locator(".waterfall tbody tr").evaluateAll(all => all.map(tr => {
      const lane = tr.querySelector(".lane").getBoundingClientRect(), bar = tr.querySelector(".bar").getBoundingClientRect(), mark = tr.querySelector(".mark").getBoundingClientRect();
      return { cells: [...tr.cells].slice(0, 5).map(c => c.textContent), start: (bar.left - lane.left) / lane.width, width: bar.width / lane.width, mark: (mark.left - lane.left) / lane.width, wide: lane.width };
    }));
    assert.deepEqual(shown.map(s => s.cells), line.spans.map(s => [s.leg ? `${s.name}, ${s.leg}` : s.name, s.rank ?? "", fine(s.start_ms), fine(s.took_ms), s.outcome ?? ""]));
    const end = Math.max(line.total_ms, ...line.spans.map(s => s.start_ms + s.took_ms));
    shown.forEach((s, i) => {
      const span = line.spans[i], pixel = 3 / s.wide;
      assert.ok(Math.abs(s.start - span.start_ms / end) < pixel, `${span.name} starts at ${s.start}, want ${span.start_ms / end}`);
      assert.ok(Math.abs(s.width - span.took_ms / end) < pixel, `${span.name} takes ${s.width}, want ${span.took_ms / end}`);
      assert.ok(Math.abs(s.mark - line.ttft_ms / end) < pixel, `the first token is at ${s.mark}, want ${line.ttft_ms / end}`);
    });
    const rec = await api(`/admin/v1/explain?id=${id}`);
    for (const d of rec.decisions) {
      const table = page.locator(`[aria-label="Candidates for the ${d.leg} leg, attempt ${d.attempt}"]`);
      assert.deepEqual(await table.locator("tr.chosen td:first-child").allTextContents(), [`→ ${d.chosen}`]);
      assert.equal(await table.locator("tbody tr").count(), d.shown.length);
    }
    await page.getByRole("link", { name: line.decode, exact: true }).first().click();
    await title(page, `Worker ${DECODE.slice(0, 20)}`);
    await close(page);
    const unknown = await signedIn("view=request&id=nobody");
    await unknown.getByText('request "nobody" is not kept').waitFor();
    await close(unknown);
  },

  async "the worker's page shows the API's figures"() {
    const page = await signedIn(`view=worker&id=${DECODE}`);
    await page.locator('[aria-label="Legs since the start"] tbody tr').first().waitFor();
    const { worker: w } = await api(`/admin/v1/status?detail=${DECODE}`), r = w.ranks[0];
    const text = label => page.locator(`[aria-label="${label}"] tbody tr`).first().locator("td").allTextContents();
    assert.deepEqual((await text("KV cache by tier")).slice(2, 5), [r.cached_blocks_by_tier.device, r.cached_blocks_by_tier.host, r.cached_blocks_by_tier.disk].map(n => n.toLocaleString("en")));
    assert.ok(r.cached_blocks_by_tier.device > 0, "the index has no blocks of the rank");
    const ok = r.legs.find(l => l.leg === "decode" && l.outcome === "ok");
    assert.deepEqual((await text("Legs since the start")).slice(0, 4), [String(r.rank), "decode", "ok", ok.count.toLocaleString("en")]);
    assert.deepEqual((await text("Ranks")).slice(0, 3), [String(r.rank), r.feed, r.breaker]);
    assert.match((await text("Learned rates"))[3], new RegExp(`^[\\d.e+-]+ µs, ${r.rates_learned_from.decode ? `${r.rates_learned_from.decode} legs` : "not learned"}$`));
    const facts = await page.locator(".facts").textContent();
    for (const want of [w.url, w.engine, w.version, "sim", "config"]) assert.ok(facts.includes(want), `${want} is not in ${facts}`);
    await page.locator('[aria-label="KV transfers"]').getByText("nixl", { exact: true }).waitFor();
    const recent = await rows(page, "Latest requests of the worker");
    const { requests } = (await api(`/admin/v1/status?parts=requests&limit=20&worker=${DECODE}`)).requests;
    assert.deepEqual(recent, requests.map(q => q.id));
    await close(page);
    const gone = await signedIn("view=worker&id=nobody");
    await gone.getByText("There is no worker nobody.").waitFor();
    await close(gone);
  },

  // An engine that never answered has reported no usage: -1 in the API.
  async "usage that no engine has reported is unknown"() {
    const page = await signedIn("");
    const card = page.locator(".node", { hasText: "down-0" });
    await card.waitFor();
    assert.match(await card.locator(".meter .value").first().textContent(), /^usage unknown · /);
    assert.ok(!(await page.locator("body").textContent()).includes("-100 %"), "a negative usage is shown");
    await close(page);
  },

  async "queues and sessions show the API's figures"() {
    const page = await signedIn("view=queues");
    await page.locator('[aria-label="latest sessions"] tbody tr').first().waitFor();
    const o = await api("/admin/v1/sessions?limit=50");
    assert.ok(o.sessions >= 3, `${o.sessions} sessions`);
    assert.deepEqual(await rows(page, "latest sessions"), o.newest.map(s => s.key));
    const q = await api("/admin/v1/queues");
    assert.deepEqual(await rows(page, "admission classes"), q.classes.map(c => c.class));
    assert.deepEqual(await page.locator('[aria-label="admission classes"] thead th').allTextContents(), ["class", "requests", "on hold", "suspended", "bytes", "tokens", "oldest, ms"]);
    assert.equal(await page.locator('[aria-label="Sessions"] dd').first().textContent(), String(o.sessions));
    await close(page);
  },

  // What these simulated engines do not cause: transfers that they report, and a full admission queue.
  // The answers have the form of those of a router that has them.
  async "measured transfers and an admission queue are shown"() {
    const page = await signedIn("view=models");
    await title(page, "Models");
    await page.route("**/admin/v1/status?*", async route => {
      const st = await (await route.fetch()).json();
      st.can.queues = true;
      st.queues = {
        admission: {
          classes: [{ class: "interactive", requests: 12, on_hold: 4, suspended: 0, bytes: 8192, tokens: 5600, oldest_ms: 1500 }, { class: "batch", requests: 3456, on_hold: 0, suspended: 7, bytes: 65536, tokens: 81234, oldest_ms: 61000 }],
          pools: [{ pool: "sim prefill", class: "interactive", requests: 12, on_hold: 4, bytes: 8192, tokens: 5600, tokens_per_second: 830, tenants: 2 }],
          tenants: [{ pool: "sim prefill", class: "interactive", tenant: "team-a", weight: 1, requests: 9, on_hold: 4, tokens: 4100, late: 0 }],
        },
      };
      const transfers = {
        active: "zmq", reason: "nixl is off: no NIXL", pending: 41, reports: { recv_ok: 1234, recv_failed: 3, unknown: 0 }, outcomes: { done: 1234, failed: 3, unknown: 0 },
        tiers: [{ tier: "nixl", state: "off", reason: "no NIXL: not at /opt" }, { tier: "zmq", state: "up", reason: "reports are taken at tcp://10.0.0.9:8091" }],
        pairs: [{ from: `${PREFILL}/0`, to: "d2/0", transfers: 334, bytes_per_s: 0, ms_per_token: 0 }, { from: "p1/1", to: `${DECODE}/0`, transfers: 900, bytes_per_s: 2.5e9, ms_per_token: 0.052 }],
      };
      if (st.transfers) st.transfers = transfers;
      if (st.worker) st.worker.transfers = transfers;
      await route.fulfill({ json: st });
    });
    const cells = label => page.locator(`[aria-label="${label}"] tbody tr`).evaluateAll(all => all.map(tr => [...tr.cells].map(c => c.textContent)));
    const pairs = [["p1/1", `${DECODE}/0`, "900", "2.50 GB/s", "52.0"], [`${PREFILL}/0`, "d2/0", "334", "–", "–"]];
    await visit(page, "view=overview", '[aria-label="Transfers between ranks"] tbody tr');
    assert.deepEqual(await cells("Transfers between ranks"), pairs);
    assert.deepEqual((await cells("Tiers of transfer notifications"))[0], ["nixl", "off", "no NIXL: not at /opt"]);
    await page.getByText("41 in flight; ended: 1,234 done, 3 failed; reports: 3 recv failed, 1,234 recv ok").waitFor();
    await page.getByText("notifications over zmq").waitFor();
    await visit(page, `view=worker&id=${DECODE}`, '[aria-label="Transfers between ranks"] tbody tr');
    assert.deepEqual(await cells("Transfers between ranks"), pairs.slice(0, 1), "only those of the worker");
    await visit(page, "view=queues", '[aria-label="admission classes"] tbody tr');
    assert.deepEqual(await cells("admission classes"), [["interactive", "12", "4", "0", "8,192", "5,600", "1,500"], ["batch", "3,456", "0", "7", "65,536", "81,234", "61,000"]]);
    assert.deepEqual(await cells("admission pools"), [["sim prefill", "interactive", "12", "4", "8,192", "5,600", "830", "2"]]);
    assert.deepEqual(await cells("admission tenants"), [["sim prefill", "interactive", "team-a", "1", "9", "4", "4,100", "0"]]);
    await axe(page, "queues");
    await page.setViewportSize({ width: 390, height: 844 });
    for (const label of ["admission classes", "admission pools", "admission tenants"]) {
      const held = await page.locator(`[aria-label="${label}"] tbody tr:first-child td[data-label="on hold"]`).evaluate(td => ({ text: td.textContent, visible: td.checkVisibility(), right: td.getBoundingClientRect().right }));
      assert.ok(held.text === "4" && held.visible && held.right <= 390, `${label} at 390 px: ${JSON.stringify(held)}`);
    }
    await axe(page, "queues at 390 px");
    if (SHOTS) await page.screenshot({ path: `${SHOTS}/admission.png` });
    await close(page);
  },

  // A request that has waited for admission: none of this check's engines is ever full.
  async "the wait of a request shows its class, tenant and position"() {
    const { id, class: c, tenant } = await streamed();
    assert.deepEqual([c, tenant], ["interactive", "team-a"]);
    const page = await signedIn("view=models");
    await title(page, "Models");
    await page.route("**/admin/v1/status?*", async route => {
      const st = await (await route.fetch()).json();
      st.request?.timeline?.spans.unshift({ name: "queue", start_ms: 0.2, took_ms: 12.5, class: c, tenant, position: 1234 });
      await route.fulfill({ json: st });
    });
    await visit(page, `view=request&id=${id}`, ".waterfall tbody tr");
    assert.equal(await page.locator(".facts dd", { hasText: "class interactive, tenant team-a" }).count(), 1);
    const cells = await page.locator(".waterfall tbody tr").first().evaluate(tr => [...tr.cells].slice(0, 5).map(c => c.textContent));
    assert.deepEqual(cells, ["queue", "", "0.20", "12.5", "class interactive, tenant team-a, position 1,234"]);
    await axe(page, "a request that has waited");
    await close(page);
  },

  async "models and keys show the API's figures"() {
    const page = await signedIn("view=models");
    await page.locator('[aria-label="Models"] tbody tr').first().waitFor();
    const { models, keys } = await api("/admin/v1/status?parts=models,keys");
    const sum = m => Object.values(m.outcomes).reduce((a, b) => a + b, 0).toLocaleString("en");
    const cells = async (label, ...at) => page.locator(`[aria-label="${label}"] tbody tr`).evaluateAll((all, at) => all.map(tr => at.map(i => tr.cells[i].textContent)), at);
    assert.deepEqual(await cells("Models", 0, 8, 9), models.map(m => [m.model, sum(m), String(m.outcomes.failed)]));
    assert.deepEqual((await cells("Models", 0, 1)).find(c => c[0] === "sim"), ["sim", "2 prefill, 2 of 3 decode"]);
    await page.getByRole("link", { name: "API keys" }).click();
    await page.locator('[aria-label="API keys"] tbody tr').first().waitFor();
    assert.deepEqual(await cells("API keys", 0, 1, 7, 8, 9), keys.map(k => [k.name, k.models?.join(", ") ?? "all", k.admitted, k.limited, k.tokens].map(v => typeof v === "number" ? v.toLocaleString("en") : v)));
    await page.getByRole("link", { name: "team-b" }).click();
    await title(page, "API key team-b");
    await page.getByText("of 6,000 a minute").waitFor();
    await page.getByText("It may use the models sim, broken, none.").waitFor();
    const { requests } = (await api("/admin/v1/status?parts=requests&limit=50&key=team-b")).requests;
    await until("the key's requests", async () => (await rows(page, "Latest requests of the key")).join() === requests.map(q => q.id).join());
    await close(page);
  },

  // The legs in flight are those of the cards of the same update, while they change all the time.
  async "one update is one snapshot"() {
    await control("/start");
    try {
      const page = await signedIn("");
      await page.locator("[data-column=decode] .node").first().waitFor();
      const seen = new Set();
      await until("legs in flight were seen", async () => {
        const [tile, cards] = await page.evaluate(() => [document.querySelector("[data-part=fly]").textContent,
          [...document.querySelectorAll(".node .meter:last-child .value")].reduce((n, e) => n + parseInt(e.textContent.replaceAll(",", ""), 10), 0)]);
        assert.equal(tile, String(cards), "legs in flight, and the sum over the ranks");
        seen.add(tile);
        return seen.size >= 2;
      });
      await close(page);
    } finally { await control("/stop"); }
  },

  // "Latest requests" goes on after a visit to a request, and while a row has the focus, which it keeps.
  async "the latest requests stay current"() {
    const page = await signedIn("");
    const label = "Latest requests";
    const table = `[aria-label="${label}"] tbody tr td:first-child`;
    await page.locator(table).first().waitFor();
    await page.locator(`${table} a`).first().click();
    await title(page, "Request");
    await page.goBack();
    await page.locator(table).first().waitFor();
    const before = await rows(page, label);
    await control("/requests?n=3");
    await until("a new request is shown", async () => !before.includes((await rows(page, label))[0]));
    await page.locator(`${table} a`).nth(1).focus();
    const held = await page.evaluate(() => document.activeElement.textContent), top = (await rows(page, label))[0];
    await control("/requests?n=20"); // more than are shown
    await until("the list moves on", async () => (await rows(page, label))[0] !== top);
    assert.equal(await page.evaluate(() => document.activeElement.textContent), held, "the focused row");
    await page.getByRole("button", { name: "Pause" }).click();
    await page.locator("#status", { hasText: "paused" }).waitFor();
    const paused = await rows(page, label);
    await control("/requests?n=2");
    await page.waitForTimeout(1500); // three updates would have happened
    assert.deepEqual(await rows(page, label), paused, "a paused list");
    await page.getByRole("button", { name: "Resume" }).click();
    await until("the list moves on again", async () => (await rows(page, label))[0] !== paused[0]);
    await close(page);
  },

  async "drain and its end, with cancel and confirmation"() {
    const page = await signedIn("view=workers");
    const button = page.getByRole("button", { name: `Drain: ${DECODE}` }), dialog = page.locator("#confirm");
    await button.click();
    await dialog.getByText(`Drain ${DECODE}?`).waitFor();
    await axe(page, "the confirmation");
    await dialog.getByRole("button", { name: "Cancel" }).click();
    await dialog.waitFor({ state: "hidden" });
    assert.equal(await stateOf(DECODE), "ready", "after Cancel");
    await button.click();
    await page.keyboard.press("Escape");
    await dialog.waitFor({ state: "hidden" });
    assert.equal(await stateOf(DECODE), "ready", "after Escape");
    assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), `Drain: ${DECODE}`, "the focus returns to the button");
    await button.click();
    await dialog.getByRole("button", { name: "Drain", exact: true }).click();
    await page.locator("#toast", { hasText: `${DECODE} is draining` }).waitFor();
    assert.equal(await stateOf(DECODE), "draining");
    await page.getByRole("button", { name: `End drain: ${DECODE}` }).waitFor();
    // The other way from the worker's page, by keyboard alone.
    await page.getByRole("link", { name: DECODE }).focus();
    await page.keyboard.press("Enter");
    await title(page, `Worker ${DECODE}`);
    await page.locator(".title .pill", { hasText: "draining" }).waitFor();
    await page.getByRole("button", { name: "End drain" }).focus();
    await page.keyboard.press("Enter");
    await dialog.getByText(`End the drain of ${DECODE}?`).waitFor();
    await page.keyboard.press("Tab");
    await page.keyboard.press("Enter");
    await until("the worker is ready again", async () => await stateOf(DECODE) === "ready");
    await page.locator(".title .pill", { hasText: "ready" }).waitFor();
    await close(page);
  },

  async "reload, with cancel, confirmation and a broken file"() {
    const page = await signedIn("view=models"), dialog = page.locator("#confirm");
    const decodeTimeout = async () => (await api("/admin/v1/config")).timeouts.decode;
    const button = page.getByRole("button", { name: "Reload configuration" }), before = await decodeTimeout();
    await button.click();
    await dialog.getByText("The configuration file has no changes").waitFor();
    await dialog.getByRole("button", { name: "Close" }).click();
    await control("/config", "timeouts: {decode: 123s}\nadmin_typo: 1\n");
    expected = [/422/];
    await button.click();
    await dialog.getByText("admin_typo").waitFor();
    await dialog.getByRole("button", { name: "Close" }).click();
    expected = [];
    await control("/config", "timeouts: {decode: 123s}\nlog: {format: json}\n");
    await button.click();
    await dialog.getByText("timeouts.decode").waitFor();
    await dialog.getByText("1 of 2 need a restart").waitFor();
    await axe(page, "the changes");
    if (SHOTS) await page.screenshot({ path: `${SHOTS}/reload.png` });
    await dialog.getByRole("button", { name: "Cancel" }).click();
    assert.equal(await decodeTimeout(), before, "after Cancel");
    await button.click();
    await dialog.getByRole("button", { name: "Reload", exact: true }).click();
    await page.locator("#toast", { hasText: "Applied: timeouts.decode" }).waitFor();
    await until("the change is applied", async () => await decodeTimeout() !== before);
    await control("/config", "");
    await button.click();
    await dialog.getByRole("button", { name: "Reload", exact: true }).click();
    await until("the change is taken back", async () => await decodeTimeout() === before);
    await close(page);
  },

  // Every control of every view is reached by the Tab key, in its order and with a visible focus.
  async "everything is reached by keyboard"() {
    for (const width of [1280, 390]) {
      const page = await signedIn("", { width });
      await title(page, "Overview");
      await page.getByRole("button", { name: "Pause" }).click();
      for (const view of VIEWS) await walk(page, width, view);
      await close(page);
    }
    const page = await signedIn("");
    await title(page, "Overview");
    await page.evaluate(() => document.activeElement.blur());
    await page.keyboard.press("Tab");
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
    await page.keyboard.press("Enter");
    assert.equal(await page.evaluate(() => document.activeElement.id), "main");
    assert.equal(new URL(page.url()).hash, "", "the skip link leaves the address alone");
    await page.getByRole("link", { name: "Workers" }).focus();
    await page.keyboard.press("Enter");
    await title(page, "Workers");
    assert.equal(await page.evaluate(() => document.activeElement.textContent), "Workers", "a new view has the focus on its heading");
    await close(page);
  },

  async "a router that compares shows both"() {
    const base = COMPARED.slice(0, COMPARED.indexOf("/#"));
    await control("/compared");
    const page = await open(COMPARED.slice(base.length + 1), { base });
    await page.getByText("p50, round robin").waitFor();
    await until("the other router's figure is shown", async () => /^round robin: [\d.,]+ ms$/.test(await page.locator("[data-part=p50-sub]").textContent()));
    await close(page);
  },

  // A router of which nothing optional is there: no keys, no timelines; and one that has gone.
  async "a router that does not respond is named"() {
    expected = [/ERR_FAILED|ERR_INTERNET|Failed to load/];
    const page = await signedIn("");
    await page.locator("#status", { hasText: "6 of 7" }).or(page.locator("#status", { hasText: "1 of 7 workers not ready" })).waitFor();
    await page.context().setOffline(true);
    await page.locator("#status", { hasText: "the router does not respond" }).waitFor();
    await page.context().setOffline(false);
    await page.locator("#status", { hasText: "workers not ready" }).waitFor();
    await close(page);
  },
};

let failed = 0;
for (const [name, check] of Object.entries(checks)) {
  if (ONLY && !name.includes(ONLY)) continue;
  expected = [];
  faults.length = 0;
  const began = Date.now();
  try {
    await check();
    assert.deepEqual(faults, [], "what no page may do");
    console.log(`ok      ${name} (${((Date.now() - began) / 1000).toFixed(1)} s)`);
  } catch (e) {
    failed++;
    console.log(`FAILED  ${name}\n${e.stack}\n${faults.join("\n")}`);
    for (const c of browser.contexts()) await c.close();
  }
}
await browser.close();
process.exit(failed ? 1 : 0);
