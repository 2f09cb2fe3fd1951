// The console fetches one snapshot of the router for each update of the page and passes it to the
// view that the address names. Each view says how often it wants one and of which parts.

import { reload } from "./actions.js";
import { Refused, hasToken, setToken, status } from "./api.js";
import { duration, el, link, setText } from "./dom.js";
import { key, keys } from "./keys.js";
import { model, models } from "./models.js";
import { overview } from "./overview.js";
import { queues } from "./queues.js";
import { request } from "./request.js";
import { requests } from "./requests.js";
import { hash, state, take } from "./route.js";
import { worker, workers } from "./workers.js";

const $ = id => document.getElementById(id);

const VIEWS = { overview, requests, request, workers, worker, models, model, keys, key, queues };
// The navigation's entries: the view, and those that are shown as part of it.
const NAV = [["overview"], ["requests", "request"], ["workers", "worker"], ["models", "model"], ["keys", "key"], ["queues"]];
const HISTORY = 125_000; // ms of samples that are kept for charts

// shared is what views share: the samples of this router and the one that it is compared with.
const shared = { samples: { own: [], compared: [] }, names: { own: "router", compared: "compared" }, refresh };

let current = null; // {name, view, shown}
let paused = false;
let due = true; // an update that does not wait for the pause to end or the page to be visible
let wake = () => {};

// refresh makes the next update happen now.
function refresh() {
  due = true;
  wake();
}

function pill(text, cls) {
  setText($("status"), text);
  $("status").className = `pill ${cls ?? ""}`;
}

// show replaces the view by the one that the address names. A view that changes its filters in the
// address itself does not cause it.
function show() {
  const s = state(), view = VIEWS[s.view] ?? overview;
  const first = current === null;
  current?.shown.close();
  const root = $("view");
  root.replaceChildren();
  current = { name: s.view, view, shown: view.mount(root, s, shared) };
  document.title = `${view.title(s)} · Sluice`;
  for (const a of $("nav").querySelectorAll("a")) {
    const on = a.dataset.views.split(" ").includes(VIEWS[s.view] ? s.view : "overview");
    if (on) a.setAttribute("aria-current", "page"); else a.removeAttribute("aria-current");
  }
  if (!first) {
    scrollTo(0, 0);
    root.querySelector(".view-title")?.focus({ preventScroll: true });
  }
}

function buildNav() {
  $("nav").querySelector("ul").replaceChildren(...NAV.map(views => {
    const a = link(views[0] === "overview" ? "#" : hash({ view: views[0] }), VIEWS[views[0]].title({}));
    a.dataset.views = views.join(" ");
    return el("li", "", a);
  }));
  document.querySelector(".skip").onclick = e => { e.preventDefault(); $("main").focus(); }; // the fragment is the view's
  $("reload").onclick = () => reload(refresh);
  $("pause").onclick = () => {
    paused = !paused;
    $("pause").setAttribute("aria-pressed", String(paused));
    setText($("pause"), paused ? "Resume" : "Pause");
    if (paused) pill("paused");
    refresh();
  };
}

function keep(which, st) {
  if (!st) return;
  const all = shared.samples[which];
  shared.names[which] = st.name.replaceAll("_", " ");
  all.push(...st.history);
  while (all.length && all[0].t < st.now.t - HISTORY) all.shift();
}

async function update() {
  const at = current, s = state(), { samples } = shared;
  const since = all => all.at(-1)?.t ?? 0;
  const st = await status({ ...at.view.params(s), since: since(samples.own), compared_since: since(samples.compared) });
  if (at !== current) return; // the answer is for another view
  keep("own", st.stats);
  keep("compared", st.compared);
  at.shown.update(st);
  frame(st);
}

// frame shows what all views have in common.
function frame(st) {
  const { workers: all, ready } = st.fleet, ill = all - ready;
  pill(paused ? "paused" : ill ? `${ill} of ${all} workers not ready` : `${all} workers ready`, paused ? "" : ill ? "bad" : "fine");
  setText($("about"), `${st.stats.version ? `${st.stats.version} · ` : ""}policy ${shared.names.own} · up ${duration(st.stats.uptime_s)}`);
  $("nav").hidden = false;
  $("reload").hidden = !st.can.reload;
  for (const [view, has] of [["keys", st.can.keys], ["queues", st.can.queues]]) {
    $("nav").querySelector(`a[data-views~=${view}]`).parentNode.hidden = !has && !current.name.startsWith(view.slice(0, -1));
  }
}

function askToken(why) {
  $("login").hidden = false;
  $("view").hidden = $("nav").hidden = true;
  if (why) $("login-why").textContent = why;
  pill("closed", "bad");
  return new Promise(done => {
    $("login").onsubmit = e => {
      e.preventDefault();
      setToken($("token").value.trim());
      $("login").hidden = true;
      $("view").hidden = false;
      done();
    };
    $("token").focus();
  });
}

// pause waits, at most until refresh is called.
const pause = ms => new Promise(done => {
  const timer = setTimeout(done, ms);
  wake = () => { clearTimeout(timer); done(); };
});

async function main() {
  const token = take();
  if (token) setToken(token);
  buildNav();
  if (!hasToken()) await askToken();
  show();
  addEventListener("hashchange", () => { take(); show(); refresh(); });
  for (;;) {
    const began = performance.now();
    if (due || !(document.hidden || paused)) {
      due = false;
      try {
        await update();
      } catch (e) {
        if (e.status === 401) {
          await askToken("This router does not accept the token. Unless admin.token is set, it changes at each start.");
          due = true;
        } else pill(e.message, "bad");
        if (!(e instanceof Refused)) console.error(e);
      }
    }
    if (!due) await pause(Math.max(50, current.view.poll - (performance.now() - began)));
  }
}
main();
