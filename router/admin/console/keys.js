// The list of API keys and the page of one key.

import { el, link, panel, perSecond, setText, whole } from "./dom.js";
import { tileSet } from "./models.js";
import { listParams, requestTable, title } from "./requests.js";
import { hash } from "./route.js";
import { Table } from "./table.js";

const WINDOW = 10_000; // ms over which rates are computed from the totals of two updates

// Rates computes rates of totals that are observed from time to time.
class Rates {
  #seen = new Map(); // name -> [[t, totals], …]

  // observe adds the totals of a name at t, and returns their rates a second over the window.
  observe(name, t, totals) {
    const all = this.#seen.get(name) ?? [];
    this.#seen.set(name, all);
    all.push([t, totals]);
    while (all.length > 2 && all[1][0] <= t - WINDOW) all.shift();
    const [t0, first] = all[0], seconds = (t - t0) / 1000;
    return totals.map((v, i) => seconds > 0 && v >= first[i] ? (v - first[i]) / seconds : null);
  }
}

const limit = (k, what) => k.limits?.find(l => l.what === what);
const left = l => l ? `${whole(l.remaining)} of ${whole(l.per_minute)}` : "no limit";
const observed = (rates, t) => k => {
  const [admitted, limited, tokens] = rates.observe(k.name, t, [k.admitted, k.limited, k.tokens]);
  return { ...k, rates: { admitted, limited, tokens } };
};

export const keys = {
  title: () => "API keys",
  poll: 1000,
  params: () => ({ parts: "keys" }),

  mount(root) {
    const rates = new Rates();
    const table = new Table("API keys", [
      { head: "key", text: k => k.name, href: k => hash({ view: "key", id: k.name }) },
      { head: "models", text: k => k.models?.join(", ") ?? "all", cls: () => "why" },
      { head: "requests/s", num: true, text: k => perSecond(k.rates.admitted) },
      { head: "tokens/s", num: true, text: k => whole(k.rates.tokens) },
      { head: "limited/s", num: true, text: k => perSecond(k.rates.limited), cls: k => k.rates.limited > 0 ? "bad" : "" },
      { head: "requests left", num: true, text: k => left(limit(k, "requests")) },
      { head: "tokens left", num: true, text: k => left(limit(k, "tokens")) },
      { head: "admitted", num: true, text: k => whole(k.admitted) },
      { head: "limited", num: true, text: k => whole(k.limited) },
      { head: "tokens", num: true, text: k => whole(k.tokens) },
    ], { key: k => k.name, empty: "the router has no API keys: every client may use it" });
    root.append(title("API keys"), el("section", "panel", el("p", "quiet", "Rates over 10 s of this page, counts since the start; limits are a minute’s."), table.el));
    return { update(st) { table.update((st.keys ?? []).map(observed(rates, st.t))); }, close() {} };
  },
};

export const key = {
  title: s => `API key ${s.id}`,
  poll: 1000,
  params: s => ({ parts: "keys,requests", ...listParams({ key: s.id }, 50) }),

  mount(root, s) {
    const rates = new Rates(), missing = el("p", "bad", `There is no API key ${s.id}.`), body = el("div"), facts = el("p", "quiet");
    missing.hidden = true;
    root.append(title(`API key ${s.id}`), missing, body);
    const fill = tileSet(body, ["Requests", "Tokens", "Limited", "Requests left", "Tokens left"]);
    const recent = requestTable("Latest requests of the key", { wide: true }), last = panel("Latest requests");
    last.head.append(el("p", "quiet", link(hash({ view: "requests", key: s.id }), "all, with filters")));
    last.body.append(recent.el);
    body.append(facts, last.root);
    return {
      update(st) {
        const found = (st.keys ?? []).find(k => k.name === s.id);
        missing.hidden = Boolean(found);
        body.hidden = !found;
        if (!found) return;
        const k = observed(rates, st.t)(found);
        const remaining = what => { const l = limit(k, what); return l ? [whole(l.remaining), "", `of ${whole(l.per_minute)} a minute`] : ["–", "", "no limit"]; };
        fill({
          Requests: [perSecond(k.rates.admitted), "/s", `${whole(k.admitted)} since the start`],
          Tokens: [whole(k.rates.tokens), "/s", `${whole(k.tokens)} since the start`],
          Limited: [perSecond(k.rates.limited), "/s", `${whole(k.limited)} since the start`],
          "Requests left": remaining("requests"),
          "Tokens left": remaining("tokens"),
        });
        setText(facts, `It may use ${k.models?.length ? `the models ${k.models.join(", ")}` : "every model"}.`);
        recent.update(st.requests.requests);
      },
      close() {},
    };
  },
};
