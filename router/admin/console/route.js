// The state of the view is in the fragment of the page's address, as name=value pairs, so that a
// link restores it: #view=requests&outcome=failed. The token, if it is there, is taken out.

// take returns the fragment's members and the token that was among them, which it removes from the
// address. "#token=T&why=ID" is the former form of a link to a request.
export function take() {
  const q = new URLSearchParams(location.hash.slice(1));
  const token = q.get("token");
  if (token || q.has("why")) {
    q.delete("token");
    if (q.has("why")) {
      q.set("view", "request");
      q.set("id", q.get("why"));
      q.delete("why");
    }
    history.replaceState(null, "", q.size ? `#${q}` : location.pathname);
  }
  return token;
}

// state returns the members of the current address; view is "overview" by default.
export function state() {
  const s = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  return { ...s, view: s.view ?? "overview" };
}

// hash returns the fragment for a state, without empty members.
export function hash(s) {
  const q = new URLSearchParams();
  for (const [k, v] of Object.entries(s)) if (v != null && v !== "") q.set(k, v);
  return `#${q}`;
}

// update replaces members of the current state without an entry in the history.
export function update(members) {
  history.replaceState(null, "", hash({ ...state(), ...members }));
}

// workerOf returns the worker of a rank, worker/rank.
export const workerOf = rank => rank.slice(0, rank.lastIndexOf("/"));
export const workerLink = rank => hash({ view: "worker", id: workerOf(rank) });
