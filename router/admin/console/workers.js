// The list of workers and the page of one worker.

import { drain, drainLabel } from "./actions.js";
import { el, fine, link, panel, percent, setText, whole } from "./dom.js";
import { listParams, requestTable, title } from "./requests.js";
import { hash, state as route, update } from "./route.js";
import { Table } from "./table.js";
import { Transfers } from "./transfers.js";

const stateClass = w => w.state === "ready" ? "fine" : w.state === "draining" ? "" : "bad";
const sum = (w, member) => w.ranks.reduce((n, r) => n + r[member], 0);
const usage = v => v >= 0 ? `${percent(v)} %` : "–"; // negative: not reported
const reported = n => n >= 0 ? whole(n) : "–";

// breakers names the breakers of a worker that are not closed.
function breakers(w) {
  const open = w.ranks.filter(r => r.breaker !== "closed");
  return open.length ? open.map(r => `${r.id} ${r.breaker}`).join(", ") : "closed";
}

export const workers = {
  title: () => "Workers",
  poll: 1000,
  params: () => ({ parts: "workers" }),

  mount(root, s, { refresh }) {
    const role = el("select"), state = el("select"), found = el("p", "quiet");
    for (const [select, values] of [[role, ["", "prefill", "decode", "aggregated"]], [state, ["", "ready", "not ready"]]]) {
      select.append(...values.map(v => { const o = el("option", "", v || "any"); o.value = v; return o; }));
    }
    role.value = s.role ?? "";
    state.value = s.state ?? "";
    const form = el("form", "filters", el("label", "", el("span", "", "Role"), role), el("label", "", el("span", "", "State"), state));
    form.setAttribute("aria-label", "Filters");
    form.onchange = () => { update({ role: role.value, state: state.value }); refresh(); };
    form.onsubmit = e => e.preventDefault();
    const table = new Table("Workers", [
      { head: "worker", text: w => w.id, href: w => hash({ view: "worker", id: w.id }) },
      { head: "role", text: w => w.role },
      { head: "state", text: w => w.state, cls: stateClass },
      { head: "reason", text: w => w.reason ?? "", cls: () => "why" },
      { head: "engine", text: w => [w.engine, w.version].filter(Boolean).join(" ") || "–" },
      { head: "models", text: w => (w.models ?? []).join(", "), cls: () => "why" },
      { head: "ranks", num: true, text: w => whole(w.ranks.length) },
      { head: "legs", num: true, text: w => whole(sum(w, "requests")) },
      { head: "KV used", num: true, text: w => usage(Math.max(...w.ranks.map(r => r.kv_usage))) },
      { head: "blocks cached", num: true, text: w => whole(sum(w, "cached_blocks")) },
      { head: "breaker", text: breakers, cls: w => breakers(w) === "closed" ? "" : "bad" },
      { head: "", text: () => "", button: w => ({ label: drainLabel(w), name: `${drainLabel(w)}: ${w.id}`, run: () => drain(w, refresh) }) },
    ], { empty: "no worker" });
    root.append(title("Workers"), el("section", "panel", form, found, table.el));
    return {
      update(st) {
        const now = route();
        const list = st.workers.filter(w => (!now.role || w.role === now.role) && (!now.state || (w.state === "ready") === (now.state === "ready")));
        setText(found, `${whole(list.length)} of ${whole(st.workers.length)} workers`);
        table.update(list);
      },
      close() {},
    };
  },
};

// rates in ms per unit, as µs, with the number of legs they were learned from.
function rate(r, member, name) {
  const ms = r.rates_ms?.[member], n = r.rates_learned_from?.[name] ?? 0;
  return ms == null ? "–" : `${(ms * 1000).toPrecision(3)} µs${n ? `, ${whole(n)} legs` : ", not learned"}`;
}

export const worker = {
  title: s => `Worker ${s.id}`,
  poll: 1000,
  params: s => ({ detail: s.id, parts: "requests", ...listParams({ worker: s.id }, 20) }),

  mount(root, s, { refresh }) {
    let current = null;
    const state = el("span", "pill"), button = el("button", ""), facts = el("dl", "facts"), missing = el("p", "bad");
    button.type = "button";
    button.onclick = () => drain(current, refresh);
    missing.hidden = true;
    const ranks = new Table("Ranks", [
      { head: "rank", text: r => String(r.rank) },
      { head: "events", text: r => r.feed, cls: r => r.feed === "live" ? "fine" : "" },
      { head: "breaker", text: r => r.breaker, cls: r => r.breaker === "closed" ? "fine" : "bad" },
      { head: "legs", num: true, text: r => whole(r.requests) },
      { head: "tokens to prefill", num: true, text: r => whole(r.prefill_tokens) },
      { head: "decode blocks", num: true, text: r => whole(r.decode_blocks) },
      { head: "engine: running / waiting", num: true, text: r => `${reported(r.engine_running)} / ${reported(r.engine_waiting)}` },
    ]);
    const kv = new Table("KV cache by tier", [
      { head: "rank", text: r => String(r.rank) },
      { head: "used", num: true, text: r => usage(r.kv_usage) },
      { head: "device blocks", num: true, text: r => whole(r.cached_blocks_by_tier?.device ?? r.cached_blocks) },
      { head: "host blocks", num: true, text: r => whole(r.cached_blocks_by_tier?.host) },
      { head: "disk blocks", num: true, text: r => whole(r.cached_blocks_by_tier?.disk) },
      { head: "capacity", num: true, text: r => r.total_blocks ? whole(r.total_blocks) : "–" },
      { head: "tokens a block", num: true, text: r => r.block_size ? whole(r.block_size) : "–" },
    ]);
    const rates = new Table("Learned rates", [
      { head: "rank", text: r => String(r.rank) },
      { head: "prefill, a token", num: true, text: r => rate(r, "prefill", "prefill") },
      { head: "transfer, a token", num: true, text: r => rate(r, "transfer", "transfer") },
      { head: "decode, a block and step", num: true, text: r => rate(r, "block", "decode") },
    ]);
    const legs = new Table("Legs since the start", [
      { head: "rank", text: l => String(l.rank) },
      { head: "leg", text: l => l.leg },
      { head: "outcome", text: l => l.outcome, cls: l => l.outcome === "ok" ? "fine" : "bad" },
      { head: "number", num: true, text: l => whole(l.count) },
      { head: "mean, ms", num: true, text: l => l.seconds ? fine(l.seconds / l.count * 1000) : "–" },
    ], { key: l => `${l.rank} ${l.leg} ${l.outcome}`, empty: "no leg has ended" });
    const recent = requestTable("Latest requests of the worker");
    const parts = [["Ranks", ranks], ["KV cache", kv], ["Learned rates", rates], ["Legs", legs]].map(([name, table]) => {
      const p = panel(name);
      p.body.append(table.el);
      return p.root;
    });
    const nixl = el("section", "panel"), transfers = new Transfers(nixl, s.id), last = panel("Latest requests");
    nixl.setAttribute("aria-label", "KV transfers");
    last.head.append(el("p", "quiet", link(hash({ view: "requests", worker: s.id }), "all, with filters")));
    last.body.append(recent.el);
    const body = el("div", "", facts, el("div", "two", ...parts), nixl, last.root);
    root.append(el("div", "title", title(`Worker ${s.id}`), state, button), missing, body);
    return {
      update(st) {
        const w = st.worker;
        current = w ?? current;
        missing.hidden = Boolean(w);
        body.hidden = state.hidden = button.hidden = !w;
        if (!w) { setText(missing, `There is no worker ${s.id}.`); return; }
        setText(state, w.state + (w.reason ? `: ${w.reason}` : ""));
        state.className = `pill ${stateClass(w)}`;
        setText(button, drainLabel(w));
        describe(facts, w);
        ranks.update(w.ranks);
        kv.update(w.ranks);
        rates.update(w.ranks);
        legs.update(w.ranks.flatMap(r => r.legs.map(l => ({ ...l, rank: r.rank }))));
        transfers.draw(w.transfers);
        recent.update(st.requests.requests);
      },
      close() {},
    };
  },
};

function describe(facts, w) {
  const rows = [["Role", w.role], ["Address", w.url], ["Engine", [w.engine, w.version].filter(Boolean).join(" ") || "unknown"], ["Models", (w.models ?? []).join(", ") || "unknown"]];
  if (w.adapters?.length) rows.push(["LoRA adapters", w.adapters.join(", ")]);
  if (w.labels?.length) rows.push(["Labels", w.labels.join(", ")]);
  if (w.max_model_len) rows.push(["Longest context", `${whole(w.max_model_len)} tokens`]);
  if (w.source) rows.push(["Source", w.source]);
  const known = JSON.stringify(rows);
  if (facts.dataset.known === known) return;
  facts.dataset.known = known;
  facts.replaceChildren(...rows.map(([name, value]) => el("div", "", el("dt", "", name), el("dd", "", value))));
}
