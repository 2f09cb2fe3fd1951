// The admission queue and sessions. The router sends an object with members that are lists of flat
// objects, flat objects, or values; each list becomes a table with the columns that it has.

import { clock, el, fine, panel, setText, whole } from "./dom.js";
import { title } from "./requests.js";
import { Table } from "./table.js";

const heading = name => words(name[0].toUpperCase() + name.slice(1));
const words = name => name.replace(/_[nm]s$/, ", ms").replaceAll("_", " ");

// shown formats a value by its type and by the unit at the end of its name.
function shown(name, v) {
  if (v == null) return "–";
  if (typeof v === "number") return name.endsWith("_ns") ? fine(v / 1e6) : Number.isInteger(v) ? whole(v) : v.toFixed(2);
  if (typeof v === "boolean") return v ? "yes" : "no";
  if (Array.isArray(v)) return v.join(", ") || "–";
  if (/^\d{4}-\d\d-\d\dT/.test(v)) return clock(Date.parse(v));
  return String(v);
}

// flat lists the members with their names. The lists of an object are members too.
function flat(queues) {
  return Object.entries(queues ?? {}).filter(([, v]) => v != null).flatMap(([name, v]) =>
    typeof v === "object" && !Array.isArray(v) && Object.values(v).some(Array.isArray)
      ? Object.entries(v).map(([k, x]) => [`${name}_${k}`, x]) : [[name, v]]);
}

export const queues = {
  title: () => "Queues",
  poll: 1000,
  params: () => ({ parts: "queues" }),

  mount(root) {
    const none = el("p", "quiet", "This router has no admission queue and no sessions.");
    root.append(title("Queues"), none);
    const parts = new Map(); // member -> {root, show}
    return {
      update(st) {
        const members = flat(st.queues);
        none.hidden = members.length > 0;
        for (const [name, value] of members) {
          const kind = Array.isArray(value) ? `list ${columnsOf(value)}` : typeof value === "object" ? "object" : "value";
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

// columnsOf lists the members of a list's rows; some rows may lack some.
const columnsOf = rows => [...new Set(rows.flatMap(row => Object.keys(row)))];

function list(name, value) {
  const columns = columnsOf(value), p = panel(heading(name));
  const table = new Table(words(name), columns.map(c => ({ head: words(c), num: value.some(row => typeof row[c] === "number"), text: row => shown(c, row[c]) })),
    { key: row => columns.filter(c => typeof row[c] === "string").map(c => row[c]).join(" ") });
  p.body.append(table.el);
  return { root: p.root, show: rows => table.update(rows) };
}

function object(name) {
  const p = panel(heading(name)), facts = el("dl", "facts"), cells = new Map();
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
        setText(cells.get(k), shown(k, v));
      }
    },
  };
}
