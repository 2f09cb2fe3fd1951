// A line chart of the last two minutes, drawn by uPlot, with the current values as its key.

import { clock, el, setText, fine } from "./dom.js";

const SPAN = 120; // seconds shown at most
const LEAST = 30; // and at least

const dark = matchMedia("(prefers-color-scheme: dark)");

export class Chart {
  // series: [{label(), colour (a custom property of the style sheet), dash, of: "own" or "compared", value(sample) -> number or null}]
  constructor(box, series, { unit, max, label }) {
    this.box = box;
    this.series = series;
    this.unit = unit;
    this.max = max;
    this.label = label;
    this.plotBox = el("div", "plot");
    this.plotBox.setAttribute("role", "img");
    this.key = el("ul", "key");
    box.append(this.key, this.plotBox);
    this.keys = series.map(s => {
      const item = el("li", "", el("i", `line ${s.dash ? "dashed" : ""}`), el("span"));
      item.firstChild.style.color = `var(${s.colour})`;
      this.key.append(item);
      return item;
    });
    this.samples = [];
    this.rebuild = () => this.#build();
    dark.addEventListener("change", this.rebuild);
    this.#build();
    this.observer = new ResizeObserver(() => this.#resize());
    this.observer.observe(this.plotBox);
  }

  close() {
    dark.removeEventListener("change", this.rebuild);
    this.observer.disconnect();
    this.plot.destroy();
  }

  #size() { return { width: Math.max(this.plotBox.clientWidth, 60), height: 170 }; }

  #resize() {
    const s = this.#size();
    if (this.plot.width !== s.width) this.plot.setSize(s);
  }

  #build() {
    this.plot?.destroy();
    const style = getComputedStyle(document.documentElement), colour = name => style.getPropertyValue(name).trim();
    const font = "11px system-ui, sans-serif", axis = { stroke: colour("--quiet"), font, grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot({
      ...this.#size(),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false } },
      scales: { x: { range: (_, min, max) => [max - Math.min(SPAN, Math.max(LEAST, max - min)), max] }, y: { range: (_, __, max) => [0, this.max ?? niceMax(max)] } },
      axes: [{ ...axis, space: 90, size: 26, values: (_, all) => all.map(v => clock(v * 1000)) }, { ...axis, size: 44, values: (_, all) => all.map(v => v >= 40 || Number.isInteger(v) ? v.toLocaleString("en") : String(+v.toFixed(2))) }],
      series: [{}, ...this.series.map(s => ({ stroke: colour(s.colour), width: s.dash ? 1.5 : 2, dash: s.dash ? [4, 4] : [], points: { show: false }, alpha: s.dash ? .7 : 1 }))],
      hooks: { setCursor: [() => this.#values()] },
    }, this.#data(), this.plotBox);
    this.#values();
  }

  // draw shows samples: {own: [{t, …}], compared: […]}, t in ms.
  draw(samples) {
    this.samples = samples;
    this.plot.setData(this.#data());
    this.#values();
  }

  #data() {
    const of = which => this.samples[which] ?? [];
    const groups = ["own", "compared"].map(which => [of(which).map(p => p.t / 1000), ...this.series.filter(s => s.of === which).map(s => of(which).map(p => s.value(p)))]);
    const used = groups.filter(g => g.length > 1 && g[0].length);
    if (!used.length) return [[], ...this.series.map(() => [])];
    const joined = uPlot.join(used);
    // The columns of the join have the order of the groups; give them that of the series.
    let next = 1;
    const columns = new Map();
    for (const which of ["own", "compared"]) for (const s of this.series) if (s.of === which && of(which).length) columns.set(s, joined[next++]);
    const x = joined[0];
    return [x, ...this.series.map(s => columns.get(s) ?? x.map(() => null))];
  }

  // values shows the values at the cursor, or else the last ones, in the key.
  #values() {
    const at = this.plot.cursor.idx, shown = [];
    this.series.forEach((s, i) => {
      const all = this.samples[s.of] ?? [], item = this.keys[i];
      item.hidden = all.length === 0;
      let v = all.length ? s.value(all.at(-1)) : null;
      if (at != null) v = this.plot.data[i + 1][at] ?? near(this.plot.data[i + 1], at);
      setText(item.lastChild, `${s.label()} ${v == null ? "–" : `${fine(v)} ${this.unit}`}`);
      if (!item.hidden) shown.push(item.lastChild.textContent);
    });
    if (at == null) this.plotBox.setAttribute("aria-label", `${this.label}: ${shown.join(", ")}`);
  }
}

// near returns the last value before an index; two sets of samples have different times.
function near(values, at) {
  for (let i = at; i >= 0 && i > at - 4; i--) if (values[i] != null) return values[i];
  return null;
}

function niceMax(v) {
  if (!(v > 0)) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  for (const m of [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10]) if (v <= m * p) return m * p;
  return 10 * p;
}
