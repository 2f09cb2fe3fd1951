// A table with rows that are updated in place: rows have keys, and only texts that differ change. A row
// that has the focus stays until the focus leaves it, so that a list that moves can be used with the
// keyboard. On a narrow screen a row becomes a card; see console.css.

import { el, setText } from "./dom.js";

export class Table {
  // columns: [{head, num, text(row), href(row), cls(row), title(row), button(row) -> {label, run} or null}]
  constructor(caption, columns, { empty = "none", key = row => row.id, rowClass, stack = true } = {}) {
    this.columns = columns;
    this.key = key;
    this.rowClass = rowClass;
    this.rows = new Map(); // key -> {tr, cells, row}
    this.body = el("tbody");
    const head = el("tr");
    for (const c of columns) {
      const th = el("th", c.num ? "n" : "", c.head || el("span", "hidden", "action"));
      th.scope = "col";
      head.append(th);
    }
    this.table = el("table", stack ? "stack" : "", el("caption", "hidden", caption), el("thead", "", head), this.body);
    this.none = el("p", "quiet", empty);
    this.el = el("div", "scroll", this.table, this.none);
    this.el.tabIndex = 0;
    this.el.setAttribute("role", "group");
    this.el.setAttribute("aria-label", caption);
  }

  update(list) {
    const wanted = list.map(row => this.#row(row));
    const held = wanted.length || this.rows.size ? this.#focused() : null;
    if (held && !wanted.includes(held)) wanted.splice(Math.min([...this.body.children].indexOf(held), wanted.length), 0, held);
    const keep = new Set(wanted);
    for (const [k, r] of this.rows) if (!keep.has(r.tr)) { r.tr.remove(); this.rows.delete(k); }
    place(this.body, wanted, held);
    this.none.hidden = list.length > 0;
    this.table.hidden = wanted.length === 0;
  }

  #focused() {
    const a = document.activeElement;
    return a && this.body.contains(a) ? a.closest("tr") : null;
  }

  #row(row) {
    const k = String(this.key(row));
    let r = this.rows.get(k);
    if (!r) {
      r = { tr: el("tr"), cells: this.columns.map(c => cell(c)), row };
      r.tr.append(...r.cells.map(c => c.td));
      this.rows.set(k, r);
    }
    r.row = row;
    const cls = this.rowClass?.(row) ?? "";
    if (r.tr.className !== cls) r.tr.className = cls;
    for (const c of r.cells) c.show(row);
    return r.tr;
  }
}

function cell(column) {
  const td = el("td", column.num ? "n" : "");
  if (column.head) td.dataset.label = column.head;
  let inner = null;
  return {
    td,
    show(row) {
      const button = column.button?.(row), href = column.href?.(row);
      const tag = button ? "BUTTON" : href ? "A" : "SPAN";
      if (inner?.tagName !== tag) {
        inner = el(tag.toLowerCase());
        td.replaceChildren(inner);
      }
      if (button) {
        inner.type = "button";
        inner.onclick = button.run;
        if (button.name) inner.setAttribute("aria-label", button.name);
      }
      if (href && inner.getAttribute("href") !== href) inner.href = href;
      setText(inner, button ? button.label : String((column.button ? "" : column.text(row)) ?? ""));
      const cls = column.cls?.(row) ?? "";
      if (inner.className !== cls) inner.className = cls;
      const title = column.title?.(row) ?? "";
      if (inner.title !== title) inner.title = title;
    },
  };
}

// place puts the rows into the body in order. It does not move the row that has the focus, because
// an element that is moved loses it.
function place(body, rows, held) {
  const at = held ? rows.indexOf(held) : 0;
  for (let i = at - 1; i >= 0; i--) if (rows[i].nextSibling !== rows[i + 1] || rows[i].parentNode !== body) body.insertBefore(rows[i], rows[i + 1]);
  for (let i = held ? at + 1 : 0; i < rows.length; i++) {
    const after = i ? rows[i - 1].nextSibling : body.firstChild;
    if (after !== rows[i]) body.insertBefore(rows[i], after);
  }
}
