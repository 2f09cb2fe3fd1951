// A line chart, in SVG, of at most the last two minutes.

const NS = "http://www.w3.org/2000/svg";
const SPAN = 120_000; // ms shown at most
const LEAST = 30_000; // and at least
const PAD = { left: 42, right: 10, top: 8, bottom: 20 };

export function svg(tag, attrs, ...children) {
  const e = document.createElementNS(NS, tag);
  for (const [k, v] of Object.entries(attrs || {})) e.setAttribute(k, v);
  e.append(...children);
  return e;
}

function niceMax(v) {
  if (!(v > 0)) return 1;
  const p = 10 ** Math.floor(Math.log10(v));
  for (const m of [1, 1.2, 1.6, 2, 3, 4, 6, 8, 10]) if (v <= m * p) return m * p;
  return 10 * p;
}

const plain = v => v >= 100 ? Math.round(v).toLocaleString("en") : v >= 10 ? v.toFixed(1) : v.toFixed(2);

export class Chart {
  // series: [{label, cls, value(sample) -> number|null, compared: bool}]
  constructor(box, key, series, { unit, max } = {}) {
    this.box = box; this.series = series; this.unit = unit; this.max = max;
    this.samples = { own: [], compared: [] };
    this.svg = svg("svg", { role: "img" });
    this.tip = document.createElement("div");
    this.tip.className = "tip"; this.tip.hidden = true;
    box.append(this.svg, this.tip);
    this.key = key;
    this.hover = null;
    box.addEventListener("pointermove", e => { this.hover = e.clientX - box.getBoundingClientRect().left; this.draw(); });
    box.addEventListener("pointerleave", () => { this.hover = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(box);
  }

  add(which, samples) {
    const all = this.samples[which];
    all.push(...samples);
    const old = (all.at(-1)?.t ?? 0) - SPAN - 2000;
    let i = 0;
    while (i < all.length && all[i].t < old) i++;
    all.splice(0, i);
  }

  shown() { return this.series.filter(s => !s.compared || this.samples.compared.length); }

  legend() {
    const have = this.shown().map(s => s.label()).join();
    if (have === this.drawnKey) return;
    this.drawnKey = have;
    this.key.replaceChildren(...this.shown().flatMap(s => [
      svg("svg", { viewBox: "0 0 20 8", "aria-hidden": "true" }, svg("path", { d: "M1 4H19", class: s.cls })), s.label()]));
  }

  draw() {
    this.legend();
    const w = this.box.clientWidth, h = this.box.clientHeight;
    if (!w || !h) return;
    const now = Math.max(this.samples.own.at(-1)?.t ?? 0, this.samples.compared.at(-1)?.t ?? 0) || Date.now();
    const first = Math.min(this.samples.own[0]?.t ?? now, this.samples.compared[0]?.t ?? now);
    const span = Math.max(LEAST, Math.min(SPAN, now - first));
    const from = now - span;
    const inner = { w: w - PAD.left - PAD.right, h: h - PAD.top - PAD.bottom };
    let top = this.max ?? 0;
    if (!this.max) {
      for (const s of this.shown()) for (const p of this.samples[s.compared ? "compared" : "own"]) if (p.t >= from) top = Math.max(top, s.value(p) ?? 0);
      top = niceMax(top * 1.05);
    }
    const x = t => PAD.left + (t - from) / span * inner.w;
    const y = v => PAD.top + (1 - Math.min(v, top) / top) * inner.h;
    const out = [];
    for (let i = 0; i <= 4; i++) {
      const v = top * i / 4, yy = Math.round(y(v)) + .5;
      out.push(svg("line", { x1: PAD.left, x2: w - PAD.right, y1: yy, y2: yy, class: "grid" }));
      const t = svg("text", { x: PAD.left - 6, y: yy + 4, "text-anchor": "end" });
      t.textContent = top >= 40 ? Math.round(v).toLocaleString("en") : String(+v.toFixed(top >= 4 ? 1 : 2));
      out.push(t);
    }
    const step = span > 60_000 ? 30 : 10;
    for (let s = 0; s * 1000 <= span; s += step) {
      const at = x(now - s * 1000);
      const t = svg("text", { x: at, y: h - 4, "text-anchor": s === 0 ? "end" : at < PAD.left + 14 ? "start" : "middle" });
      t.textContent = s ? `−${s} s` : "now";
      out.push(t);
    }
    const latest = [];
    for (const s of this.shown()) {
      let d = "", pen = false, last = null, lastT = 0;
      for (const p of this.samples[s.compared ? "compared" : "own"]) {
        const v = s.value(p);
        if (p.t < from || v == null) { pen = false; continue; }
        d += `${pen && p.t - lastT < 3000 ? "L" : "M"}${x(p.t).toFixed(1)} ${y(v).toFixed(1)}`;
        pen = true; last = v; lastT = p.t;
      }
      if (d) out.push(svg("path", { d, class: s.cls }));
      if (last != null) latest.push(`${s.label()} ${plain(last)} ${this.unit}`);
    }
    if (this.hover != null && this.hover > PAD.left) {
      const t = from + (this.hover - PAD.left) / inner.w * span;
      out.push(svg("line", { x1: this.hover, x2: this.hover, y1: PAD.top, y2: h - PAD.bottom, class: "cursor" }));
      const lines = [`${Math.round((now - t) / 1000)} s ago`];
      for (const s of this.shown()) {
        const p = nearest(this.samples[s.compared ? "compared" : "own"], t);
        const v = p && s.value(p);
        if (v != null) lines.push(`${s.label()}: ${plain(v)} ${this.unit}`);
      }
      this.tip.replaceChildren(...lines.map(l => { const e = document.createElement("div"); e.textContent = l; return e; }));
      this.tip.hidden = false;
      this.tip.style.left = this.hover > w / 2 ? "" : `${this.hover + 10}px`;
      this.tip.style.right = this.hover > w / 2 ? `${w - this.hover + 10}px` : "";
    } else this.tip.hidden = true;
    this.svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    this.svg.setAttribute("aria-label", latest.length ? `Now: ${latest.join(", ")}` : "No data yet");
    this.svg.replaceChildren(...out);
  }
}

function nearest(samples, t) {
  let best = null;
  for (const p of samples) if (Math.abs(p.t - t) < 2000 && (!best || Math.abs(p.t - t) < Math.abs(best.t - t))) best = p;
  return best;
}
