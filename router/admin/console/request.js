// The page of one request: its timeline as a waterfall, and why each leg went where it did.

import { bytes, el, fine, link, outcomeClass, panel, whole } from "./dom.js";
import { hash, workerLink } from "./route.js";
import { ended, title } from "./requests.js";
import { Table } from "./table.js";

export const request = {
  title: s => `Request ${s.id}`,
  poll: 1000,
  params: s => ({ request: s.id }),

  mount(root, s) {
    const facts = el("dl", "facts"), line = panel("Timeline"), why = panel("Why it went there", "costs are estimated milliseconds; the lowest wins");
    root.append(title(`Request ${s.id}`), facts, line.root, why.root);
    let shown = "";
    return {
      update(st) {
        const page = st.request, known = JSON.stringify(page);
        if (known === shown) return;
        shown = known;
        facts.replaceChildren(...summary(page));
        line.body.replaceChildren(...waterfall(page));
        why.body.replaceChildren(...explanation(page));
      },
      close() {},
    };
  },
};

function summary({ timeline: t, explain: x }) {
  const rows = [];
  const add = (name, ...value) => rows.push(el("div", "", el("dt", "", name), el("dd", "", ...value)));
  if (!t) {
    const o = x?.outcome;
    if (x) add("Outcome", o ? `${o.status}${o.reason ? ` ${o.reason}` : ""} after ${fine(o.total_ms)} ms` : "in flight");
    return rows;
  }
  add("Outcome", el("span", t.outcome === "ok" ? "fine" : "bad", ended(t)));
  if (t.model) add("Model", link(hash({ view: "model", id: t.model }), t.model));
  if (t.key) add("API key", link(hash({ view: "key", id: t.key }), t.key));
  add("Received", new Date(t.received).toLocaleString("en", { hour12: false }));
  add("Endpoint", `${t.endpoint ?? ""}${t.stream ? ", streamed" : ""}`);
  if (t.client) add("Client", t.client);
  if (t.plan) add("Plan", `${t.plan}${t.family ? `, ${t.family}` : ""}${t.fallback ? `; fall-back: ${t.fallback}` : ""}`);
  if (t.class || t.tenant) add("Admission", admission(t));
  add("Tokens", `${whole(t.prompt_tokens)} prompt, ${t.output_tokens > 0 ? whole(t.output_tokens) : "?"} output; cached ${whole(t.cached_predicted)} predicted, ${t.cached_reported >= 0 ? whole(t.cached_reported) : "?"} actual`);
  if (t.ttft_ms) add("First token", `${fine(t.ttft_ms)} ms`);
  if (t.itl_p50_ms) add("Between tokens", `p50 ${fine(t.itl_p50_ms)} ms, p99 ${fine(t.itl_p99_ms)} ms`);
  add("Total", `${fine(t.total_ms)} ms`);
  add("Size", `${bytes(t.request_bytes)} in, ${bytes(t.response_bytes)} out`);
  if (t.trace_id) add("Trace", el("code", "", t.trace_id));
  return rows;
}

// admission names the class and the tenant, and how the request waited, of a request or of its queue's span.
function admission({ class: c, tenant, position }) {
  return [c ? `class ${c}` : "", tenant ? `tenant ${tenant}` : "", position ? `position ${whole(position)}` : ""].filter(Boolean).join(", ");
}

const COLOURS = { "prefill leg": "prefill", "decode leg": "decode", "whole leg": "whole", "KV transfer": "transfer", stream: "stream", queue: "queue" };

function waterfall({ timeline: t, no_timeline: missing }) {
  if (!t) return [el("p", "quiet", missing)];
  const spans = t.spans, end = Math.max(t.total_ms, ...spans.map(s => s.start_ms + s.took_ms), .001);
  const body = el("tbody");
  for (const s of spans) {
    const bar = el("div", `bar ${COLOURS[s.name] ?? "step"}`), track = el("td", "lane", bar);
    bar.style.left = `${Math.max(s.start_ms, 0) / end * 100}%`;
    bar.style.width = `${s.took_ms / end * 100}%`;
    const where = el("td", "");
    if (s.rank) where.append(link(workerLink(s.rank), s.rank));
    const row = el("tr", "", el("th", "", s.leg ? `${s.name}, ${s.leg}` : s.name), where, el("td", "n", fine(s.start_ms)), el("td", "n", fine(s.took_ms)),
      el("td", outcomeClass(s.outcome) || (s.outcome && s.name.endsWith("leg") ? "bad" : ""), [s.outcome, s.bytes ? bytes(s.bytes) : "", admission(s)].filter(Boolean).join(", ")), track);
    row.firstChild.scope = "row";
    body.append(row);
  }
  if (t.ttft_ms) for (const lane of body.querySelectorAll(".lane")) {
    const mark = el("i", "mark");
    mark.style.left = `${t.ttft_ms / end * 100}%`;
    lane.append(mark);
  }
  const head = el("tr");
  for (const [name, cls] of [["part", ""], ["rank", ""], ["start, ms", "n"], ["took, ms", "n"], ["details", ""], [`0 – ${fine(end)} ms${t.ttft_ms ? "; the line is the first token" : ""}`, ""]]) {
    const th = el("th", cls, name);
    th.scope = "col";
    head.append(th);
  }
  const scroll = el("div", "scroll", el("table", "waterfall", el("caption", "hidden", "Parts of the request"), el("thead", "", head), body));
  scroll.tabIndex = 0;
  scroll.setAttribute("role", "group");
  scroll.setAttribute("aria-label", "Parts of the request");
  const out = [scroll];
  if (t.spans_dropped) out.push(el("p", "quiet", `${whole(t.spans_dropped)} more legs and choices are not shown`));
  return out;
}

const TERMS = ["prefill", "transfer", "queue", "waiting", "decode", "pressure", "eviction", "others"];

function explanation({ explain: rec, no_explain: missing }) {
  if (!rec) return [el("p", "quiet", missing)];
  const out = [];
  for (const d of rec.decisions) {
    out.push(el("h4", "", `${d.leg} leg, attempt ${d.attempt}: ${d.chosen || "no candidate"}`));
    out.push(el("p", "quiet", `at ${fine(d.at_ms)} ms, policy ${rec.policy.replaceAll("_", " ")}; ${whole(d.prompt_tokens)} prompt tokens, ${whole(d.candidates)} candidates${d.excluded ? `, ${d.excluded} excluded` : ""}`));
    const terms = TERMS.filter(t => d.shown.some(c => c.terms_ms[t]));
    const table = new Table(`Candidates for the ${d.leg} leg, attempt ${d.attempt}`, [
      { head: "rank", text: c => `${c.chosen ? "→ " : c.excluded ? "× " : ""}${c.rank}`, href: c => workerLink(c.rank) },
      { head: "cost", num: true, text: c => c.cost_ms.toFixed(2) },
      ...terms.map(t => ({ head: t, num: true, text: c => (c.terms_ms[t] ?? 0).toFixed(2) })),
      { head: "cached tokens", num: true, text: c => `${c.overlap_approximate ? "~" : c.overlap_in_flight ? "+" : c.overlap_unknown ? "?" : ""}${whole(c.cached_tokens)}` },
      { head: "tokens to prefill", num: true, text: c => whole(c.prefill_tokens_reserved) },
      { head: "blocks", num: true, text: c => whole(c.decode_blocks_reserved) },
      { head: "requests", num: true, text: c => whole(c.requests) },
      { head: "events", text: c => c.feed },
    ], { key: c => c.rank, rowClass: c => c.chosen ? "chosen" : c.excluded ? "out" : "" });
    table.update(d.shown.toSorted((a, b) => (a.excluded ?? false) - (b.excluded ?? false) || a.cost_ms - b.cost_ms));
    out.push(table.el);
  }
  if (rec.notes?.length) {
    out.push(el("h4", "", "Notes"), el("ul", "", ...rec.notes.map(n => el("li", "", `${fine(n.at_ms)} ms: ${n.text}`))));
  }
  return out;
}
