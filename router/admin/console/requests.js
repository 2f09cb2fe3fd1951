// The list of requests with its filters, which are in the address.

import { status } from "./api.js";
import { clock, el, fine, whole } from "./dom.js";
import { hash, update, workerLink } from "./route.js";
import { Table } from "./table.js";

const OUTCOMES = [["", "any"], ["ok", "ok"], ["failed", "failed"], ["rejected", "rejected"], ["client_gone", "client gone"],
  ["migrated", "migrated"], ["retried", "retried"], ["in_flight", "in flight"]];
const FILTERS = ["model", "worker", "key", "class", "tenant", "outcome", "slow"];

// most is the number of requests shown, which are long cards on a phone.
const most = () => matchMedia("(max-width: 700px)").matches ? 30 : 100;

// ended describes the end of a request.
export function ended(q) {
  if (!q.done) return "in flight";
  return [q.status, q.reason, q.migrations ? "migrated" : "", q.retries ? `${q.retries} retries` : ""].filter(Boolean).join(" ");
}

const endClass = q => !q.done ? "quiet" : q.outcome === "failed" || q.outcome === "rejected" ? "bad" : "";

// requestTable makes the table of requests; wide has the columns of the view of requests.
export function requestTable(caption, { wide } = {}) {
  const more = wide ? [
    { head: "time", text: q => clock(q.t) },
    { head: "model", text: q => q.model ?? "", href: q => q.model && hash({ view: "model", id: q.model }) },
    { head: "key", text: q => q.key ?? "", href: q => q.key && hash({ view: "key", id: q.key }) },
  ] : [];
  return new Table(caption, [
    { head: "request", text: q => q.id, href: q => hash({ view: "request", id: q.id }), cls: () => "id", title: q => q.id },
    ...more,
    { head: "prefill", text: q => q.prefill ?? "–", href: q => q.prefill && workerLink(q.prefill) },
    { head: "decode", text: q => q.decode ?? q.whole ?? "–", href: q => (q.decode ?? q.whole) && workerLink(q.decode ?? q.whole) },
    { head: "prompt", num: true, text: q => whole(q.prompt_tokens) },
    { head: "cached: predicted / actual", num: true, text: q => `${whole(q.cached_predicted)} / ${q.cached_reported >= 0 ? whole(q.cached_reported) : "?"}` },
    { head: "first token, ms", num: true, text: q => q.ttft_ms ? fine(q.ttft_ms) : "–" },
    { head: "total, ms", num: true, text: q => q.total_ms ? fine(q.total_ms) : "–" },
    { head: "outcome", text: ended, cls: endClass },
  ], { key: q => `${q.id} ${q.t}`, empty: "no request matches" });
}

// listParams are the parameters of a list of requests with filters.
export const listParams = (s, limit = most()) => ({ model: s.model, worker: s.worker, key: s.key, class: s.class, tenant: s.tenant, outcome: s.outcome, slow_ms: s.slow, limit });

export const requests = {
  title: () => "Requests",
  poll: 1000,
  params: s => ({ parts: "requests", ...listParams(s) }),

  mount(root, s, { refresh }) {
    const fields = {
      model: choice("any"), worker: text("worker or rank", "worker-ids"), key: choice("any"),
      class: choice("any"), tenant: text("any"), outcome: choice(), slow: text("ms"),
    };
    fields.outcome.replaceChildren(...OUTCOMES.map(([v, label]) => option(v, label)));
    fields.slow.type = "number";
    fields.slow.min = "0";
    fields.slow.step = "any";
    const labels = { model: "Model", worker: "Worker", key: "API key", class: "Class", tenant: "Tenant", outcome: "Outcome", slow: "Slower than, ms" };
    const form = el("form", "filters");
    form.setAttribute("aria-label", "Filters");
    for (const name of FILTERS) {
      const label = el("label", "", el("span", "", labels[name]), fields[name]);
      fields[name].name = name;
      if (s[name]) ensure(fields[name], s[name]);
      fields[name].value = s[name] ?? "";
      form.append(label);
    }
    const clear = el("button", "", "Clear filters"), ids = el("datalist");
    clear.type = "button";
    ids.id = "worker-ids";
    form.append(clear, ids);
    const apply = () => {
      update(Object.fromEntries(FILTERS.map(name => [name, fields[name].value.trim()])));
      refresh();
    };
    let typing = 0;
    form.oninput = () => { clearTimeout(typing); typing = setTimeout(apply, 250); };
    form.onsubmit = e => { e.preventDefault(); apply(); };
    clear.onclick = () => { for (const f of Object.values(fields)) f.value = ""; apply(); };
    const table = requestTable("Requests", { wide: true }), found = el("p", "quiet");
    found.setAttribute("role", "status");
    root.append(title("Requests"), el("section", "panel", form), el("section", "panel", found, table.el));
    root.lastChild.setAttribute("aria-label", "Requests found");
    offer(fields, ids);
    return {
      update(st) {
        const r = st.requests;
        const text = `${whole(r.matched)} of the ${whole(r.searched)} requests that the router keeps${r.matched > r.requests.length ? `; the first ${whole(r.requests.length)} are shown` : ""}`;
        if (found.textContent !== text) found.textContent = text;
        table.update(r.requests);
      },
      close() { clearTimeout(typing); },
    };
  },
};

export function title(text) {
  const h = el("h2", "view-title", text);
  h.tabIndex = -1;
  return h;
}

// offer fills the choices with the names that the router has. Those of the filters stay.
async function offer(fields, ids) {
  let st;
  try { st = await status({ parts: "workers,models,keys,queues" }); } catch { return; }
  const fill = (select, names) => {
    const chosen = select.value;
    select.replaceChildren(option("", "any"), ...names.map(n => option(n, n)));
    if (chosen) ensure(select, chosen);
    select.value = chosen;
  };
  fill(fields.model, (st.models ?? []).map(m => m.model));
  fill(fields.key, (st.keys ?? []).map(k => k.name));
  fields.key.parentNode.hidden = !st.can.keys && !fields.key.value;
  const classes = (st.queues?.admission?.classes ?? []).map(c => c.class);
  fill(fields.class, classes);
  for (const name of ["class", "tenant"]) fields[name].parentNode.hidden = classes.length < 2 && !fields[name].value;
  ids.replaceChildren(...st.workers.map(w => option(w.id, w.id)));
}

function option(value, label) {
  const o = el("option", "", label);
  o.value = value;
  return o;
}

// ensure adds an option for a value of the address that is not offered.
function ensure(field, value) {
  if (field.tagName === "SELECT" && ![...field.options].some(o => o.value === value)) field.append(option(value, value));
}

function choice(first) {
  const s = el("select");
  if (first) s.append(option("", first));
  return s;
}

function text(placeholder, list) {
  const i = el("input");
  i.placeholder = placeholder;
  i.autocomplete = "off";
  i.spellcheck = false;
  if (list) i.setAttribute("list", list);
  return i;
}
