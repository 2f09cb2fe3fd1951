// Admission queues and sessions. The router sends an object with members that are lists of flat objects,
// flat objects, or values; each list becomes a table with the columns that it has.

import { el, panel, setText, whole } from "./dom.js";
import { title } from "./requests.js";
import { Table } from "./table.js";

const words = name => name.replaceAll("_", " ");
const shown = v => typeof v === "number" ? (Number.isInteger(v) ? whole(v) : v.toFixed(2)) : typeof v === "object" && v ? JSON.stringify(v) : String(v ?? "–");

export const queues = {
  title: () => "Queues",
  poll: 1000,
  params: () => ({ parts: "queues" }),

  mount(root) {
    const none = el("p", "quiet", "This router has no admission queue.");
    root.append(title("Queues"), none);
    const parts = new Map(); // member -> {root, show}
    return {
      update(st) {
        const members = Object.entries(st.queues ?? {}).filter(([, v]) => v != null);
        none.hidden = members.length > 0;
        for (const [name, value] of members) {
          const kind = Array.isArray(value) ? `list ${Object.keys(value[0] ?? {})}` : typeof value === "object" ? "object" : "value";
          let p = parts.get(name);
          if (p?.kind !== kind) {
            const next = Array.isArray(value) ? list(name, value) : object(name);
            if (p) p.root.replaceWith(next.root); else root.append(next.root);
            p = { ...next, kind };
            parts.set(name, p);
          }
          p.show(typeof value === "object" ? value : { [name]: value });
        }
        for (const [name, p] of parts) if (!members.some(([n]) => n === name)) { p.root.remove(); parts.delete(name); }
      },
      close() {},
    };
  },
};

function list(name, value) {
  const columns = Object.keys(value[0] ?? {}), p = panel(words(name));
  const table = new Table(words(name), columns.map(c => ({ head: words(c), num: typeof value[0][c] === "number", text: row => shown(row[c]) })),
    { key: row => columns.filter(c => typeof row[c] === "string").map(c => row[c]).join(" ") });
  p.body.append(table.el);
  return { root: p.root, show: rows => table.update(rows) };
}

function object(name) {
  const p = panel(words(name)), facts = el("dl", "facts"), cells = new Map();
  p.body.append(facts);
  return {
    root: p.root,
    show(value) {
      for (const [k, v] of Object.entries(value)) {
        if (!cells.has(k)) {
          const dd = el("dd");
          facts.append(el("div", "", el("dt", "", words(k)), dd));
          cells.set(k, dd);
        }
        setText(cells.get(k), shown(v));
      }
    },
  };
}
