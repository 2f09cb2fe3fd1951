// The overview: current values, the moving picture of requests, charts and the latest requests.

import { events } from "./api.js";
import { Chart } from "./chart.js";
import { fine, percent, perSecond, setText, whole } from "./dom.js";
import { Flow } from "./flow.js";
import { requestTable } from "./requests.js";
import { Transfers } from "./transfers.js";

const SHOWN = 14; // finished requests first: their rows are complete
const LISTED = 60;

export const overview = {
  title: () => "Overview",
  poll: 500,
  params: () => ({ parts: "workers,requests,transfers", limit: LISTED }),

  mount(root, _, history) {
    root.append(document.getElementById("overview").content.cloneNode(true));
    const part = name => root.querySelector(`[data-part=${name}]`);
    const flow = new Flow(root.querySelector("#flow")), transfers = new Transfers(part("transfers"));
    const other = () => history.names.compared, pct = v => v == null ? null : v * 100;
    const hit = new Chart(part("hit-chart"), [
      { label: () => `actual, ${other()}`, colour: "--accent", dash: true, of: "compared", value: s => pct(s.hit_actual) },
      { label: () => "predicted", colour: "--decode", of: "own", value: s => pct(s.hit_predicted) },
      { label: () => "actual", colour: "--accent", of: "own", value: s => pct(s.hit_actual) },
    ], { unit: "%", max: 100, label: "Prompt tokens from cache" });
    const ttft = new Chart(part("ttft-chart"), [
      { label: () => `p99, ${other()}`, colour: "--whole", dash: true, of: "compared", value: s => s.ttft_p99_ms },
      { label: () => `p50, ${other()}`, colour: "--accent", dash: true, of: "compared", value: s => s.ttft_p50_ms },
      { label: () => "p99", colour: "--whole", of: "own", value: s => s.ttft_p99_ms },
      { label: () => "p50", colour: "--accent", of: "own", value: s => s.ttft_p50_ms },
    ], { unit: "ms", label: "Time to first token" });
    const recent = requestTable("Latest requests");
    part("recent").append(recent.el);
    const stop = new AbortController();
    events(e => flow.event(e), stop.signal);
    return {
      update(st) {
        flow.workers(st.workers);
        tiles(part, st);
        hit.draw(history.samples);
        ttft.draw(history.samples);
        transfers.draw(st.transfers);
        const all = st.requests.requests, ended = all.filter(q => q.done);
        recent.update((ended.length < SHOWN ? all : ended).slice(0, SHOWN));
      },
      close() {
        stop.abort();
        flow.close();
        hit.close();
        ttft.close();
      },
    };
  },
};

function tiles(part, st) {
  const s = st.stats, n = s.now, t = st.compared?.now, fly = st.in_flight;
  const name = st.compared?.name.replaceAll("_", " ");
  const show = (id, text) => setText(part(id), text);
  const versus = (v, format, unit) => v == null ? "\u00a0" : `${name}: ${format(v)} ${unit}`;
  show("rps", perSecond(n.requests_per_s));
  show("rps-sub", `${whole(s.total.responses)} answered${s.total.refused ? `, ${whole(s.total.refused)} refused` : ""}`);
  show("tps", whole(n.output_tokens_per_s));
  show("tps-sub", `${whole(n.stream_events_per_s)} events/s relayed`);
  show("fly", whole(fly.prefill + fly.decode + fly.aggregated));
  show("fly-sub", fly.aggregated && !fly.prefill && !fly.decode ? `${whole(n.connections)} connections` : `${whole(fly.prefill)} in prefill, ${whole(fly.decode)} in decode`);
  show("hit", percent(n.hit_actual ?? n.hit_predicted));
  show("hit-sub", t ? versus(t.hit_actual ?? t.hit_predicted, percent, "%") : `predicted ${percent(n.hit_predicted)} %`);
  show("p50", fine(n.ttft_p50_ms));
  show("p50-sub", t ? versus(t.ttft_p50_ms, fine, "ms") : `since start ${fine(s.ttft_ms.p50)} ms`);
  show("p99", fine(n.ttft_p99_ms));
  show("p99-sub", t ? versus(t.ttft_p99_ms, fine, "ms") : `since start ${fine(s.ttft_ms.p99)} ms`);
  part("hit-sub").classList.toggle("better", t != null && n.hit_actual > t.hit_actual);
  part("p50-sub").classList.toggle("better", t?.ttft_p50_ms > n.ttft_p50_ms);
  part("p99-sub").classList.toggle("better", t?.ttft_p99_ms > n.ttft_p99_ms);
  const extra = Object.values(s.total.fallbacks ?? {}).reduce((a, b) => a + b, 0);
  show("router-sub", extra || s.total.retries ? `${whole(s.total.retries)} retries, ${whole(extra)} fall-backs` : s.name.replaceAll("_", " "));
}
