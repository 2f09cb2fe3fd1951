// The list of models and the page of one model.

import { Chart } from "./chart.js";
import { el, fine, link, panel, percent, perSecond, setText, whole } from "./dom.js";
import { listParams, requestTable, title } from "./requests.js";
import { hash } from "./route.js";
import { Table } from "./table.js";

// roles lists the ready workers of a model by role, "2 of 3" where some are not ready.
function roles(m) {
  const out = ["prefill", "decode", "aggregated"].filter(r => m.workers[r]).map(r => {
    const ready = m.workers_ready[r], all = m.workers[r];
    return `${ready === all ? whole(all) : `${whole(ready)} of ${whole(all)}`} ${r}`;
  });
  return out.join(", ") || "none";
}

const total = m => Object.values(m.outcomes).reduce((a, b) => a + b, 0);

export const models = {
  title: () => "Models",
  poll: 1000,
  params: () => ({ parts: "models" }),

  mount(root) {
    const table = new Table("Models", [
      { head: "model", text: m => m.model, href: m => hash({ view: "model", id: m.model }) },
      { head: "workers", text: roles },
      { head: "requests/s", num: true, text: m => perSecond(m.requests_per_s) },
      { head: "output tokens/s", num: true, text: m => whole(m.output_tokens_per_s) },
      { head: "failed/s", num: true, text: m => perSecond(m.failed_per_s), cls: m => m.failed_per_s > 0 ? "bad" : "" },
      { head: "from cache", num: true, text: m => m.hit_actual == null ? "–" : `${percent(m.hit_actual)} %` },
      { head: "first token p50, ms", num: true, text: m => fine(m.ttft_ms.p50) },
      { head: "first token p99, ms", num: true, text: m => fine(m.ttft_ms.p99) },
      { head: "requests", num: true, text: m => whole(total(m)) },
      { head: "failed", num: true, text: m => whole(m.outcomes.failed ?? 0) },
    ], { key: m => m.model, empty: "no model is known yet" });
    root.append(title("Models"), el("section", "panel", el("p", "quiet", "Rates and quantiles over 10 s, counts since the start."), table.el));
    return { update(st) { table.update(st.models ?? []); }, close() {} };
  },
};

// tileSet makes tiles and returns the function that fills them from {name: [value, unit, sub]}.
export function tileSet(root, names) {
  const tiles = new Map();
  const box = el("section", "tiles");
  box.setAttribute("aria-label", "Current values");
  for (const name of names) {
    const value = el("b"), unit = el("span", "unit"), sub = el("p", "quiet");
    tiles.set(name, { value, unit, sub });
    box.append(el("div", "tile", el("h3", "", name), el("p", "", value, " ", unit), sub));
  }
  root.append(box);
  return values => {
    for (const [name, [value, unit, sub]] of Object.entries(values)) {
      const t = tiles.get(name);
      setText(t.value, value);
      setText(t.unit, unit ?? "");
      setText(t.sub, sub || "\u00a0");
    }
  };
}

export const model = {
  title: s => `Model ${s.id}`,
  poll: 1000,
  params: s => ({ parts: "models,workers,requests", ...listParams({ model: s.id }, 20) }),

  mount(root, s) {
    const samples = [];
    root.append(title(`Model ${s.id}`));
    const missing = el("p", "bad", `There is no model ${s.id}.`), body = el("div");
    root.append(missing, body);
    missing.hidden = true;
    const fill = tileSet(body, ["Requests", "Output tokens", "Prompt tokens from cache", "First token, p50", "First token, p99", "Failed"]);
    const rps = panel("Requests", "a second over 10 s"), ttft = panel("Time to first token", "ms over 10 s");
    body.append(el("div", "two", rps.root, ttft.root));
    const charts = [
      new Chart(rps.body, [{ label: () => "requests", colour: "--accent", of: "own", value: m => m.requests_per_s }, { label: () => "failed", colour: "--bad", of: "own", value: m => m.failed_per_s }], { unit: "/s", label: "Requests" }),
      new Chart(ttft.body, [{ label: () => "p99", colour: "--whole", of: "own", value: m => m.ttft_ms.p99 }, { label: () => "p50", colour: "--accent", of: "own", value: m => m.ttft_ms.p50 }], { unit: "ms", label: "Time to first token" }),
    ];
    const serving = new Table("Workers of the model", [
      { head: "worker", text: w => w.id, href: w => hash({ view: "worker", id: w.id }) },
      { head: "role", text: w => w.role },
      { head: "state", text: w => w.state, cls: w => w.state === "ready" ? "fine" : "bad" },
      { head: "legs", num: true, text: w => whole(w.ranks.reduce((n, r) => n + r.requests, 0)) },
    ], { empty: "no worker serves it" });
    const recent = requestTable("Latest requests of the model"), on = panel("Workers"), last = panel("Latest requests"), counts = el("p", "quiet");
    last.head.append(el("p", "quiet", link(hash({ view: "requests", model: s.id }), "all, with filters")));
    on.body.append(serving.el);
    last.body.append(recent.el);
    body.append(counts, on.root, last.root);
    return {
      update(st) {
        const m = (st.models ?? []).find(m => m.model === s.id);
        missing.hidden = Boolean(m);
        body.hidden = !m;
        if (!m) return;
        samples.push({ ...m, t: st.t });
        while (samples[0].t < st.t - 125_000) samples.shift();
        for (const c of charts) c.draw({ own: samples });
        fill({
          Requests: [perSecond(m.requests_per_s), "/s", `${whole(total(m))} since the start`],
          "Output tokens": [whole(m.output_tokens_per_s), "/s", `${whole(m.output_tokens)} since the start`],
          "Prompt tokens from cache": [percent(m.hit_actual), "%", m.input_tokens ? `since the start ${percent(m.cached_tokens / m.input_tokens)} %` : ""],
          "First token, p50": [fine(m.ttft_ms.p50), "ms"],
          "First token, p99": [fine(m.ttft_ms.p99), "ms"],
          Failed: [perSecond(m.failed_per_s), "/s", `${whole(m.outcomes.failed ?? 0)} since the start`],
        });
        setText(counts, `Since the start: ${["ok", "rejected", "client_gone", "failed"].map(o => `${whole(m.outcomes[o] ?? 0)} ${o.replace("_", " ")}`).join(", ")}.`);
        serving.update(st.workers.filter(w => w.models?.includes(s.id)));
        recent.update(st.requests.requests);
      },
      close() { for (const c of charts) c.close(); },
    };
  },
};
