// The panel of KV transfers: the tier that notifies the router of them, why no better
// tier is in use, their outcomes, and bandwidth and time between each pair of ranks.

const el = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text != null) e.textContent = text;
  return e;
};
const whole = v => Math.round(v).toLocaleString("en");

// rate formats a bandwidth in the unit that leaves one to three digits before the decimal point.
export function rate(bytesPerSecond) {
  if (!bytesPerSecond) return "–";
  for (const [unit, size] of [["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3]])
    if (bytesPerSecond >= size) return `${(bytesPerSecond / size).toPrecision(3)} ${unit}`;
  return `${whole(bytesPerSecond)} B/s`;
}

// counted lists the counts that are not zero with their names.
export function counted(counts) {
  return Object.entries(counts ?? {}).filter(([, n]) => n > 0).sort().map(([name, n]) => `${whole(n)} ${name.replaceAll("_", " ")}`).join(", ");
}

const STATES = { up: "fine", down: "bad", starting: "", off: "quiet" };
const MOST = 200; // pairs shown, those with the most transfers first

export class Transfers {
  #root;

  constructor(root) { this.#root = root; }

  // draw shows an answer of /admin/v1/transfers.
  draw(view) {
    const enabled = view.tiers.some(t => t.tier !== "http" && t.state !== "off") || view.pairs.length > 0;
    this.#root.hidden = !enabled;
    if (!enabled) return;
    const part = name => this.#root.querySelector(`[data-part=${name}]`);
    part("active").textContent = `notifications over ${view.active}`;
    const ends = counted(view.outcomes), reports = counted(view.reports);
    part("counts").textContent = `${whole(view.pending ?? 0)} in flight${ends ? `; ended: ${ends}` : ""}${reports ? `; reports: ${reports}` : ""}`;
    part("tiers").replaceChildren(...view.tiers.map(t => {
      const row = el("tr", t.tier === view.active ? "chosen" : ""), state = el("td");
      state.append(el("span", STATES[t.state] ?? "bad", t.state));
      row.append(el("td", "", t.tier), state, el("td", "why", t.reason));
      return row;
    }));
    const pairs = view.pairs.toSorted((a, b) => b.transfers - a.transfers);
    part("pairs").replaceChildren(...pairs.slice(0, MOST).map(p => {
      const row = el("tr");
      row.append(el("td", "", p.from), el("td", "", p.to), el("td", "n", whole(p.transfers)), el("td", "n", rate(p.bytes_per_s)),
        el("td", "n", p.ms_per_token ? (p.ms_per_token * 1000).toPrecision(3) : "–"));
      return row;
    }));
    part("more").textContent = pairs.length > MOST ? `${whole(pairs.length - MOST)} more pairs` : pairs.length ? "" : "no transfer has been measured yet";
  }
}
