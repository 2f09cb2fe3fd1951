// Helpers for elements and for the formats of numbers.

export function el(tag, cls, ...content) {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  for (const c of content) if (c != null) e.append(c);
  return e;
}

// link returns a link to a view, given its hash.
export function link(hash, text, cls) {
  const a = el("a", cls, text);
  a.href = hash;
  return a;
}

// panel returns a section with a heading, and the element for its content.
export function panel(title, note) {
  const body = el("div"), head = el("div", "head", el("h3", "", title)), root = el("section", "panel", head, body);
  root.setAttribute("aria-label", title);
  if (note) head.append(el("p", "quiet", note));
  return { root, body, head };
}

// setText changes a text only when it differs, so that selections and screen readers are left alone.
export function setText(e, text) { if (e.textContent !== text) e.textContent = text; }

export const whole = v => v == null ? "–" : Math.round(v).toLocaleString("en");
export const fine = v => v == null ? "–" : v >= 100 ? whole(v) : v >= 10 ? v.toFixed(1) : v.toFixed(2);
export const percent = v => v == null ? "–" : (v * 100).toFixed(v < .995 ? 1 : 0);
export const perSecond = v => v == null ? "–" : v >= 10 ? whole(v) : v.toFixed(1);
export const clock = ms => new Date(ms).toLocaleTimeString("en", { hour12: false });

export function bytes(n) {
  for (const [unit, size] of [["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) if (n >= size) return `${(n / size).toPrecision(3)} ${unit}`;
  return `${whole(n)} B`;
}

export function duration(s) {
  if (s < 120) return `${Math.round(s)} s`;
  if (s < 7200) return `${Math.round(s / 60)} min`;
  return `${(s / 3600).toFixed(1)} h`;
}

// outcomeClass is the colour of an outcome of requests or legs.
export const outcomeClass = o => o === "ok" || o === "done" ? "fine" : o === "failed" || o === "rejected" ? "bad" : "";
