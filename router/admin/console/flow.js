// The animation: a card for each rank, and for each request a dot that moves from the
// router to its prefill rank, then to its decode rank, and disappears at the end.

const FLY = 520;       // ms for which a dot moves between two cards
const MAX_DOTS = 400;  // more would be unreadable; other requests are counted only
const FORGET = 120_000; // ms after which a request without an end is dropped

import { el, link, setText, whole } from "./dom.js";
import { workerLink } from "./route.js";

export class Flow {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("#dots");
    this.router = root.querySelector("[data-part=router]");
    this.nodes = new Map(); // rank id -> {el, ...}
    this.dots = new Map();  // request id -> dot
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.moving = false;
    this.narrow = matchMedia("(max-width: 700px)"); // the columns are below each other, without moving dots
    this.observer = new ResizeObserver(() => this.wake());
    this.observer.observe(root);
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.recolour = () => { this.colours = null; this.wake(); };
    this.dark.addEventListener("change", this.recolour);
  }

  close() {
    this.observer.disconnect();
    this.dark.removeEventListener("change", this.recolour);
    this.closed = true;
  }

  workers(list) {
    const seen = new Set();
    const rows = { prefill: [], decode: [], aggregated: [] };
    for (const w of list) for (const r of w.ranks) (rows[w.role] ?? rows.aggregated).push([w, r]);
    for (const [role, ranks] of Object.entries(rows)) {
      const col = this.root.querySelector(`[data-column=${role}]`);
      col.hidden = !ranks.length;
      const box = col.querySelector(".ranks");
      box.classList.toggle("many", ranks.length > 8);
      const most = Math.max(8, ...ranks.map(([, r]) => r.requests));
      for (const [w, r] of ranks) {
        seen.add(r.id);
        let n = this.nodes.get(r.id);
        if (!n) {
          n = card(r.id);
          this.nodes.set(r.id, n);
          box.append(n.el);
          this.wake();
        } else if (n.el.parentNode !== box) box.append(n.el);
        n.show(w, r, role, most);
      }
    }
    for (const [id, n] of this.nodes) if (!seen.has(id)) { n.el.remove(); this.nodes.delete(id); }
  }

  event(e) {
    if (e.type === "chosen" && this.nodes.has(e.rank)) {
      let d = this.dots.get(e.id);
      if (!d) {
        if (this.dots.size >= MAX_DOTS) return;
        d = { at: this.exit(this.router), seed: Math.random() };
        this.dots.set(e.id, d);
      }
      if (e.leg !== "decode" || !("warm" in d)) d.warm = e.prompt_tokens > 0 && (e.cached_tokens ?? 0) >= e.prompt_tokens / 2;
      const source = d.rank && this.nodes.get(d.rank);
      if (source) d.from = this.exit(source.el); else d.from = this.exit(this.router);
      d.rank = e.rank; d.begun = performance.now(); d.ending = false; d.seen = Date.now();
      this.wake();
    } else if (e.type === "ended") {
      const d = this.dots.get(e.id);
      if (d) { d.ending = true; d.bad = e.status >= 400; d.endedAt = Math.max(performance.now(), (d.begun ?? 0) + FLY); this.wake(); }
    }
  }

  // edge returns the middle of a card's left or right edge, in pixels of the canvas
  edge(node, right) {
    const a = node.getBoundingClientRect(), b = this.root.getBoundingClientRect();
    return { x: (right ? a.right : a.left) - b.left, y: a.top + a.height / 2 - b.top };
  }
  exit(node) { return this.edge(node, true); }

  wake() {
    if (this.moving || this.closed) return;
    this.moving = true;
    requestAnimationFrame(() => this.frame());
  }

  palette() {
    if (!this.colours) {
      const s = getComputedStyle(document.documentElement);
      this.colours = Object.fromEntries(["warm", "cold", "bad", "quiet"].map(k => [k, s.getPropertyValue(`--${k}`).trim()]));
    }
    return this.colours;
  }

  frame() {
    this.moving = false;
    if (this.closed) return;
    const w = this.root.clientWidth, h = this.root.clientHeight, dpr = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(w * dpr) || this.canvas.height !== Math.round(h * dpr)) {
      this.canvas.width = Math.round(w * dpr); this.canvas.height = Math.round(h * dpr);
    }
    const g = this.canvas.getContext("2d");
    g.setTransform(dpr, 0, 0, dpr, 0, 0);
    g.clearRect(0, 0, w, h);
    if (this.narrow.matches) { this.dots.clear(); return; }
    const colour = this.palette(), now = performance.now();
    this.rails(g, colour);
    const docked = new Map(); // rank -> dots waiting there
    const leftEdge = new Map();
    let busy = false;
    for (const [id, d] of this.dots) {
      const node = this.nodes.get(d.rank);
      if (!node || Date.now() - d.seen > FORGET) { this.dots.delete(id); continue; }
      let to = leftEdge.get(d.rank);
      if (!to) { to = this.edge(node.el, false); leftEdge.set(d.rank, to); }
      let alpha = 1, x, y;
      const p = this.still.matches ? 1 : Math.min(1, (now - d.begun) / FLY);
      if (p < 1) {
        busy = true;
        const mid = (d.from.x + to.x) / 2, q = p * p * (3 - 2 * p);
        x = bez(d.from.x, mid, mid, to.x, q);
        y = bez(d.from.y, d.from.y, to.y, to.y, q) + (d.seed - .5) * 14 * Math.sin(Math.PI * p);
      } else if (d.ending && now >= d.endedAt) {
        const faded = (now - d.endedAt) / 350;
        if (faded >= 1) { this.dots.delete(id); continue; }
        busy = true;
        const out = this.exit(node.el);
        x = out.x + faded * 26; y = out.y + (d.seed - .5) * 24; alpha = 1 - faded;
      } else {
        if (d.ending) busy = true;
        const n = docked.get(d.rank) ?? 0;
        docked.set(d.rank, n + 1);
        if (n >= 40) continue;
        x = to.x - 9 - Math.floor(n / 5) * 7; y = to.y + (n % 5 - 2) * 7; // columns of five, left of the card
      }
      g.globalAlpha = alpha;
      g.fillStyle = d.bad && d.ending ? colour.bad : d.warm ? colour.warm : colour.cold;
      g.beginPath(); g.arc(x, y, 3, 0, 7); g.fill();
    }
    g.globalAlpha = 1;
    if (busy) this.wake();
  }

  // rails draws faint lines along which dots may move
  rails(g, colour) {
    const of = role => [...this.root.querySelectorAll(`[data-column=${role}]:not([hidden]) .ranks:not(.many) .node:not(.down)`)];
    const p = of("prefill"), d = of("decode"), a = of("aggregated");
    const draw = (from, to) => {
      if (from.length * to.length > 64) return;
      for (const f of from) for (const t of to) {
        const s = this.exit(f), e = this.edge(t, false), mid = (s.x + e.x) / 2;
        g.beginPath(); g.moveTo(s.x, s.y); g.bezierCurveTo(mid, s.y, mid, e.y, e.x, e.y); g.stroke();
      }
    };
    g.strokeStyle = colour.quiet; g.lineWidth = 1; g.globalAlpha = .32;
    if (p.length) { draw([this.router], p); draw(p, d); } else draw([this.router], d);
    draw([this.router], a);
    g.globalAlpha = 1;
  }
}

const bez = (a, b, c, d, t) => { const u = 1 - t; return u * u * u * a + 3 * u * u * t * b + 3 * u * t * t * c + t * t * t * d; };

// card makes the element that shows one rank.
function card(id) {
  const root = el("div", "node"), line = el("div", "line"), name = link(workerLink(id), id, "name"), state = el("span", "state");
  line.append(name, state);
  const kv = meter("KV", "held", "use"), load = meter("load", "load");
  root.append(line, kv.el, load.el);
  return {
    el: root,
    show(w, r, role, most) {
      const ready = w.state === "ready";
      root.classList.toggle("down", !ready);
      state.classList.toggle("bad", !ready);
      setText(state, ready ? (r.breaker && r.breaker !== "closed" ? `breaker ${r.breaker}` : r.feed === "live" ? "" : `events: ${r.feed}`) : w.state + (w.reason ? `: ${w.reason}` : ""));
      root.title = `${w.url}${w.engine ? ` · ${w.engine} ${w.version ?? ""}` : ""}${w.reason ? ` · ${w.reason}` : ""}`;
      const held = r.total_blocks > 0 ? Math.min(1, r.cached_blocks / r.total_blocks) : 0;
      const used = r.kv_usage >= 0 ? `${Math.round(r.kv_usage * 100)} % used` : "usage unknown"; // negative: not reported
      kv.set([held, Math.max(0, r.kv_usage)], `${used} · ${whole(r.cached_blocks)} cached`);
      const what = role === "decode" ? `${whole(r.decode_blocks)} blocks` : role === "prefill" ? `${whole(r.prefill_tokens)} tokens` : `${whole(r.prefill_tokens)} tok · ${whole(r.decode_blocks)} bl`;
      load.set([r.requests / most], `${whole(r.requests)} req · ${what}`);
    },
  };
}

function meter(label, ...fills) {
  const root = el("div", "meter"), track = el("div", "track"), value = el("span", "value");
  const bars = fills.map(f => el("div", `fill ${f}`));
  track.append(...bars);
  root.append(el("span", "label", label), track, value);
  return { el: root, set(shares, text) { bars.forEach((b, i) => { b.style.width = `${(Math.min(1, shares[i]) * 100).toFixed(1)}%`; }); setText(value, text); } };
}
