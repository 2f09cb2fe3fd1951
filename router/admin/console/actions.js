// What changes the router: drain, undrain and reload, each after a confirmation.

import { post } from "./api.js";
import { el, whole } from "./dom.js";

const $ = id => document.getElementById(id);

// confirm shows a dialog and returns whether the user chose the action. Escape cancels. Without an
// action the dialog only informs.
export function confirm(title, body, action) {
  const dialog = $("confirm"), yes = $("confirm-yes"), no = $("confirm-no");
  $("confirm-title").textContent = title;
  $("confirm-body").replaceChildren(...body);
  yes.hidden = !action;
  yes.textContent = action ?? "";
  no.textContent = action ? "Cancel" : "Close";
  return new Promise(done => {
    let chosen = false;
    yes.onclick = () => { chosen = true; dialog.close(); };
    no.onclick = () => dialog.close();
    dialog.onclose = () => done(chosen);
    dialog.showModal();
    no.focus();
  });
}

let fading = 0;

// toast shows the result of an action for some seconds.
export function toast(text, bad) {
  const t = $("toast");
  t.hidden = false;
  t.className = bad ? "bad" : "";
  t.textContent = text;
  clearTimeout(fading);
  fading = setTimeout(() => { t.hidden = true; }, 8000);
}

// drain asks, and then drains a worker or ends its drain. done is called after a change.
export async function drain(worker, done) {
  const on = worker.state !== "draining", running = worker.ranks.reduce((n, r) => n + r.requests, 0);
  const text = on
    ? `Requests that run there go on (${whole(running)} legs now); new ones go to other workers.`
    : "It receives requests again when it is healthy.";
  if (!await confirm(on ? `Drain ${worker.id}?` : `End the drain of ${worker.id}?`, [el("p", "", text)], on ? "Drain" : "End drain")) return;
  try {
    const w = await post(`/admin/v1/workers/${encodeURIComponent(worker.id)}/drain?on=${on}`);
    toast(`${w.id} is ${w.state}${w.reason ? `: ${w.reason}` : ""}`);
  } catch (e) { toast(`${worker.id}: ${e.message}`, true); }
  done();
}

// drainLabel is the text of the button for drain.
export const drainLabel = worker => worker.state === "draining" ? "End drain" : "Drain";

// reload shows what a reload of the configuration file would change, asks, and reloads.
export async function reload(done) {
  let changes;
  try { changes = (await post("/admin/v1/reload?dry_run=true")).changes; } catch (e) {
    await confirm("The configuration cannot be reloaded", [el("pre", "bad", e.message)]);
    return;
  }
  if (!changes.length) {
    await confirm("The configuration file has no changes", [el("p", "", "The running router has all of it.")]);
    return;
  }
  const waiting = changes.filter(c => c.effect !== "applied").length;
  const body = [el("ul", "changes", ...changes.map(change))];
  if (waiting) body.push(el("p", "quiet", `${whole(waiting)} of ${whole(changes.length)} need a restart (sluice restart) and are not applied now.`));
  if (!await confirm("Reload the configuration?", body, waiting === changes.length ? null : "Reload")) return;
  try {
    const applied = (await post("/admin/v1/reload")).changes.filter(c => c.effect === "applied");
    toast(`Applied: ${applied.map(c => c.path).join(", ") || "nothing"}`);
  } catch (e) { toast(e.message, true); }
  done();
}

function change(c) {
  const item = el("li", "", el("code", "", c.path), ` ${c.old || "none"} → ${c.new || "none"}`);
  if (c.effect !== "applied") item.append(el("span", "quiet", ` · needs a restart${c.reason ? `: ${c.reason}` : ""}`));
  if (c.warning) item.append(el("p", "bad", c.warning));
  return item;
}
