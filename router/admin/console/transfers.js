// The panel of KV transfers: the tier that notifies the router of them, why no better tier is in
// use, their outcomes, and bandwidth and time between each pair of ranks.

import { bytes, el, whole } from "./dom.js";
import { workerLink, workerOf } from "./route.js";
import { Table } from "./table.js";

// counted lists the counts that are not zero with their names.
function counted(counts) {
  return Object.entries(counts ?? {}).filter(([, n]) => n > 0).sort().map(([name, n]) => `${whole(n)} ${name.replaceAll("_", " ")}`).join(", ");
}

const STATES = { up: "fine", down: "bad", off: "quiet" };
const MOST = 200; // pairs shown, those with the most transfers first

export class Transfers {
  // worker limits the pairs to those with a rank of that worker.
  constructor(root, worker) {
    this.root = root;
    this.worker = worker;
    this.active = el("span", "unit");
    this.counts = el("p", "quiet");
    this.more = el("p", "quiet");
    this.tiers = new Table("Tiers of transfer notifications", [
      { head: "tier", text: t => t.tier },
      { head: "state", text: t => t.state, cls: t => STATES[t.state] ?? "" },
      { head: "reason", text: t => t.reason, cls: () => "why" },
    ], { key: t => t.tier, rowClass: t => t.active ? "chosen" : "" });
    this.pairs = new Table("Transfers between ranks", [
      { head: "from", text: p => p.from, href: p => workerLink(p.from) },
      { head: "to", text: p => p.to, href: p => workerLink(p.to) },
      { head: "transfers", num: true, text: p => whole(p.transfers) },
      { head: "bandwidth", num: true, text: p => p.bytes_per_s ? `${bytes(p.bytes_per_s)}/s` : "–" },
      { head: "µs per token", num: true, text: p => p.ms_per_token ? (p.ms_per_token * 1000).toPrecision(3) : "–" },
    ], { key: p => `${p.from} ${p.to}`, empty: "no transfer has been measured yet" });
    root.replaceChildren(el("div", "head", el("h3", "", "KV transfers ", this.active), this.counts),
      el("div", "two", this.tiers.el, el("div", "", this.pairs.el, this.more)));
  }

  // draw shows an answer of /admin/v1/transfers; without one, and without any tier and pair, nothing.
  draw(view) {
    const shown = Boolean(view) && (view.tiers.some(t => t.tier !== "http" && t.state !== "off") || view.pairs.length > 0);
    this.root.hidden = !shown && !(this.worker && view);
    if (this.root.hidden) return;
    this.active.textContent = `notifications over ${view.active}`;
    const ends = counted(view.outcomes), reports = counted(view.reports);
    this.counts.textContent = `${whole(view.pending ?? 0)} in flight${ends ? `; ended: ${ends}` : ""}${reports ? `; reports: ${reports}` : ""}`;
    this.tiers.update(view.tiers.map(t => ({ ...t, active: t.tier === view.active })));
    const pairs = view.pairs.filter(p => !this.worker || workerOf(p.from) === this.worker || workerOf(p.to) === this.worker)
      .toSorted((a, b) => b.transfers - a.transfers);
    this.pairs.update(pairs.slice(0, MOST));
    this.more.textContent = pairs.length > MOST ? `${whole(pairs.length - MOST)} more pairs` : "";
  }
}
