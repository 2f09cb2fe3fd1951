// The console polls the statistics twice a second, reads the event stream, and
// passes both to the charts and the animation. The token is in the fragment of
// the page's address, which the browser sends to no server, and stays in this tab.

import { Chart } from "./chart.js";
import { Flow } from "./flow.js";
import { Transfers } from "./transfers.js";

const $ = id => document.getElementById(id);
const el = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text != null) e.textContent = text;
  return e;
};
const whole = v => v == null ? "–" : Math.round(v).toLocaleString("en");
const fine = v => v == null ? "–" : v >= 100 ? whole(v) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
const pct = v => v == null ? "–" : (v * 100).toFixed(v < .995 ? 1 : 0);

const given = new URLSearchParams(location.hash.slice(1)); // token=…, why=REQUEST_ID
let token = given.get("token");
if (token) {
  sessionStorage.setItem("token", token);
  history.replaceState(null, "", location.pathname);
} else token = sessionStorage.getItem("token");

const POLL = 500;
let names = { own: "router", compared: "compared" };
const last = { own: 0, compared: 0 };
let compared = true; // until the router answers that it compares with nothing
let newest = null, newestCompared = null;

const flow = new Flow($("flow"));
const transfers = new Transfers($("transfers"));
const hit = new Chart($("hit"), $("hit-key"), [
  { label: () => `actual, ${names.compared}`, cls: "s-own s-compared", compared: true, value: s => s.hit_actual == null ? null : s.hit_actual * 100 },
  { label: () => "predicted", cls: "s-own2", value: s => s.hit_predicted == null ? null : s.hit_predicted * 100 },
  { label: () => "actual", cls: "s-own", value: s => s.hit_actual == null ? null : s.hit_actual * 100 },
], { unit: "%", max: 100 });
const ttft = new Chart($("ttft"), $("ttft-key"), [
  { label: () => `p99, ${names.compared}`, cls: "s-own3 s-compared", compared: true, value: s => s.ttft_p99_ms },
  { label: () => `p50, ${names.compared}`, cls: "s-own s-compared", compared: true, value: s => s.ttft_p50_ms },
  { label: () => "p99", cls: "s-own3", value: s => s.ttft_p99_ms },
  { label: () => "p50", cls: "s-own", value: s => s.ttft_p50_ms },
], { unit: "ms" });

class Refused extends Error { constructor(status, message) { super(message); this.status = status; } }

async function api(path) {
  const r = await fetch(path, { headers: { Authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(8000) });
  const body = await r.json();
  if (!r.ok) throw new Refused(r.status, body.error?.message ?? r.statusText);
  return body;
}

function status(text, cls) {
  const s = $("status");
  if (s.textContent !== text) s.textContent = text;
  s.className = `pill ${cls ?? ""}`;
}

function askToken(why) {
  $("login").hidden = false;
  $("main").hidden = true;
  if (why) $("login-why").textContent = why;
  status("closed", "bad");
  return new Promise(done => {
    $("login").onsubmit = e => {
      e.preventDefault();
      token = $("token").value.trim();
      sessionStorage.setItem("token", token);
      $("login").hidden = true;
      $("main").hidden = false;
      done();
    };
    $("token").focus();
  });
}

function take(which, stats) {
  last[which] = stats.now.t;
  names[which] = stats.name.replaceAll("_", " ");
  hit.add(which, stats.history);
  ttft.add(which, stats.history);
}

function tiles(st, tw) {
  const n = st.now, t = tw?.now;
  $("t-rps").textContent = n.requests_per_s >= 10 ? whole(n.requests_per_s) : n.requests_per_s.toFixed(1);
  $("t-rps-sub").textContent = `${whole(st.total.responses)} answered${st.total.refused ? `, ${whole(st.total.refused)} refused` : ""}`;
  $("t-tps").textContent = whole(n.output_tokens_per_s);
  $("t-tps-sub").textContent = `${whole(n.stream_events_per_s)} events/s relayed`;
  $("t-fly").textContent = whole(n.in_prefill + n.in_decode + n.in_whole);
  $("t-fly-sub").textContent = n.in_whole && !n.in_prefill && !n.in_decode ? `${n.connections} connections` : `${n.in_prefill} in prefill, ${n.in_decode} in decode`;
  $("t-hit").textContent = pct(n.hit_actual ?? n.hit_predicted);
  $("t-hit-sub").textContent = t ? versus(t.hit_actual ?? t.hit_predicted, pct, "%") : `predicted ${pct(n.hit_predicted)} %`;
  $("t-p50").textContent = fine(n.ttft_p50_ms);
  $("t-p50-sub").textContent = t ? versus(t.ttft_p50_ms, fine, "ms") : `since start ${fine(st.ttft_ms.p50)} ms`;
  $("t-p99").textContent = fine(n.ttft_p99_ms);
  $("t-p99-sub").textContent = t ? versus(t.ttft_p99_ms, fine, "ms") : `since start ${fine(st.ttft_ms.p99)} ms`;
  $("t-hit-sub").classList.toggle("better", t != null && n.hit_actual > t.hit_actual);
  $("t-p50-sub").classList.toggle("better", t?.ttft_p50_ms > n.ttft_p50_ms);
  $("t-p99-sub").classList.toggle("better", t?.ttft_p99_ms > n.ttft_p99_ms);
  $("about").textContent = `${st.version ? `${st.version} · ` : ""}policy ${names.own} · up ${uptime(st.uptime_s)}`;
  const extra = Object.values(st.total.fallbacks ?? {}).reduce((a, b) => a + b, 0);
  $("router-sub").textContent = extra || st.total.retries ? `${whole(st.total.retries)} retries, ${whole(extra)} fall-backs` : names.own;
}

const versus = (v, f, unit) => v == null ? "\u00a0" : `${names.compared}: ${f(v)} ${unit}`;

function uptime(s) {
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

async function poll() {
  const [st, ws, tw] = await Promise.all([
    api(`/admin/v1/stats?since=${last.own}`), api("/admin/v1/workers"),
    compared ? api(`/admin/v1/compare?since=${last.compared}`).catch(e => { if (e.status === 404) compared = false; return null; }) : null,
  ]);
  take("own", st);
  newest = st;
  if (tw) { take("compared", tw); newestCompared = tw; }
  flow.workers(ws.workers);
  tiles(st, newestCompared);
  hit.draw();
  ttft.draw();
  const ill = ws.workers.filter(w => w.state !== "ready").length;
  status(ill ? `${ill} of ${ws.workers.length} workers not ready` : `${ws.workers.length} workers ready`, ill ? "bad" : "fine");
}

const SHOWN = 14; // finished requests first: their rows are complete
let recentKey = "";
async function recent() {
  const all = (await api("/admin/v1/requests?limit=150")).requests;
  const ended = all.filter(q => q.done).slice(0, SHOWN);
  const requests = ended.length < SHOWN ? all.slice(0, SHOWN) : ended;
  const key = requests.map(q => q.id + q.done).join();
  const held = document.activeElement?.closest?.("#recent"); // not while the user has a row in focus
  if (key === recentKey || held) return;
  recentKey = key;
  $("recent").tBodies[0].replaceChildren(...requests.map(q => {
    const tr = el("tr"), open = el("button", "", q.id), first = el("td"), end = el("td");
    open.type = "button";
    open.title = q.id;
    open.onclick = () => why(q.id);
    first.append(open);
    end.append(el("span", q.done && q.status >= 400 ? "bad" : "", q.done ? `${q.status}${q.reason ? ` ${q.reason}` : ""}` : "in flight"));
    tr.append(first, el("td", "", q.prefill ?? (q.whole ? "–" : "")), el("td", "", q.decode ?? q.whole ?? ""), el("td", "n", whole(q.prompt_tokens)),
      el("td", "n", `${whole(q.cached_predicted)} / ${q.cached_reported >= 0 ? whole(q.cached_reported) : "?"}`),
      el("td", "n", q.ttft_ms ? fine(q.ttft_ms) : ""), el("td", "n", q.total_ms ? fine(q.total_ms) : ""), end);
    return tr;
  }));
}

const TERMS = ["prefill", "transfer", "queue", "waiting", "decode", "pressure"];

async function why(id) {
  const body = $("why-body");
  $("why-title").textContent = `Routing of request ${id}`;
  body.replaceChildren();
  if (!$("why").open) $("why").showModal();
  let rec;
  try { rec = await api(`/admin/v1/explain?id=${encodeURIComponent(id)}`); } catch (e) { body.append(el("p", "bad", e.message)); return; }
  for (const d of rec.decisions) {
    body.append(el("h3", "", `${d.leg} leg, attempt ${d.attempt}: ${d.chosen || "no candidate"}`));
    body.append(el("p", "quiet", `${whole(d.prompt_tokens)} prompt tokens, ${whole(d.candidates)} candidates${d.excluded ? `, ${d.excluded} excluded` : ""}; costs are estimated milliseconds; the lowest wins`));
    const terms = TERMS.filter(t => d.shown.some(c => c.terms_ms[t]));
    const table = el("table"), head = el("tr"), rows = el("tbody"), top = el("thead");
    for (const h of ["rank", "cost", ...terms, "cached tokens", "tokens to prefill", "blocks", "requests", "events"]) head.append(el("th", h === "rank" || h === "events" ? "" : "n", h));
    for (const c of d.shown.toSorted((a, b) => (a.excluded ?? false) - (b.excluded ?? false) || a.cost_ms - b.cost_ms)) {
      const tr = el("tr", c.chosen ? "chosen" : c.excluded ? "out" : "");
      tr.append(el("td", "", `${c.chosen ? "→ " : c.excluded ? "× " : ""}${c.rank}`), el("td", "n", c.cost_ms.toFixed(2)), ...terms.map(t => el("td", "n", (c.terms_ms[t] ?? 0).toFixed(2))),
        el("td", "n", `${c.overlap_guessed ? "~" : c.overlap_awaited ? "+" : c.overlap_unknown ? "?" : ""}${whole(c.cached_tokens)}`), el("td", "n", whole(c.prefill_tokens_reserved)), el("td", "n", whole(c.decode_blocks_reserved)), el("td", "n", whole(c.requests)), el("td", "", c.feed));
      rows.append(tr);
    }
    top.append(head);
    table.append(top, rows);
    const scroll = el("div", "scroll");
    scroll.append(table);
    body.append(scroll);
  }
  if (rec.notes?.length) {
    body.append(el("h3", "", "Notes"));
    for (const n of rec.notes) body.append(el("p", "", `${fine(n.at_ms)} ms: ${n.text}`));
  }
  const o = rec.outcome;
  body.append(el("h3", "", "Outcome"), el("p", o && o.status >= 400 ? "bad" : "", o ? `status ${o.status}${o.reason ? ` (${o.reason})` : ""} after ${fine(o.total_ms)} ms` +
    `${o.ttft_ms ? `, first token after ${fine(o.ttft_ms)} ms` : ""}; ${whole(o.output_tokens)} output tokens` : "in flight"));
}
$("why-close").onclick = () => $("why").close();

// events reads the event stream without end; when the stream ends it connects again after a pause.
async function events() {
  for (;;) {
    try {
      const r = await fetch("/admin/v1/events", { headers: { Authorization: `Bearer ${token}` } });
      if (r.ok) {
        const reader = r.body.pipeThrough(new TextDecoderStream()).getReader();
        let rest = "";
        for (;;) {
          const { value, done } = await reader.read();
          if (done) break;
          const parts = (rest + value).split("\n\n");
          rest = parts.pop();
          if (document.hidden) continue;
          for (const p of parts) if (p.startsWith("data: ")) flow.event(JSON.parse(p.slice(6)));
        }
      }
    } catch { /* the poll reports the cause */ }
    await pause(1500);
  }
}

const pause = ms => new Promise(r => setTimeout(r, ms));

async function main() {
  if (!token) await askToken();
  let listening = false;
  for (let turn = 0; ; turn++) {
    const began = performance.now();
    if (!document.hidden || turn === 0) {
      try {
        await poll();
        if (turn % 2 === 0) await recent();
        if (turn % 4 === 0) transfers.draw(await api("/admin/v1/transfers"));
        if (!listening) {
          listening = true;
          events();
          if (given.get("why")) why(given.get("why"));
        }
      } catch (e) {
        if (e.status === 401) await askToken("This router does not accept the token. Unless admin.token is set, it changes at each start.");
        else status(e.status ? e.message : "the router does not respond", "bad");
      }
    }
    await pause(Math.max(50, POLL - (performance.now() - began)));
  }
}
main();
