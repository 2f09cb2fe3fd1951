// Calls of the admin API. The token comes in the fragment of the page's address, which browsers
// send to no server, and stays in this tab. It goes into a header of each call, which no other page
// can make a browser send: see checkRequest in tokenguard.go.

let token = sessionStorage.getItem("token");

export const hasToken = () => Boolean(token);

export function setToken(t) {
  token = t;
  sessionStorage.setItem("token", t);
}

// Refused is the error of a call that the router answered with a status other than 200, or, with
// status 0, did not answer.
export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

const TIMEOUT = 8000; // ms

async function call(method, path, timeout) {
  let r, body;
  try {
    r = await fetch(path, { method, headers: { Authorization: `Bearer ${token}` }, signal: AbortSignal.timeout(timeout) });
    body = await r.json();
  } catch { throw new Refused(0, "the router does not respond"); }
  if (!r.ok) throw new Refused(r.status, body.error?.message ?? r.statusText);
  return body;
}

export const get = path => call("GET", path, TIMEOUT);

// post changes the router. A reload may take longer than a view of it.
export const post = path => call("POST", path, 4 * TIMEOUT);

// status fetches one snapshot. params are the query's; absent values are left out.
export function status(params) {
  const q = new URLSearchParams();
  for (const [k, v] of Object.entries(params)) if (v != null && v !== "") q.set(k, v);
  return get(`/admin/v1/status?${q}`);
}

// events calls take for each event of the stream until signal is aborted. When the stream ends, it
// connects again after a pause.
export async function events(take, signal) {
  while (!signal.aborted) {
    try {
      const r = await fetch("/admin/v1/events", { headers: { Authorization: `Bearer ${token}` }, signal });
      if (r.ok) await readEvents(r.body, take);
    } catch { /* the poll reports the cause */ }
    if (!signal.aborted) await new Promise(done => setTimeout(done, 1500));
  }
}

async function readEvents(body, take) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    if (document.hidden) continue;
    for (const p of parts) if (p.startsWith("data: ")) take(JSON.parse(p.slice(6)));
  }
}
