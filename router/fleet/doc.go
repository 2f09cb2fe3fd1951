// Package fleet keeps the membership: which workers there are, what they are
// (role, models, ranks, block size, event sources), and whether each can take
// requests.
//
// Fleet is its one type. Readers take a View, an immutable snapshot swapped
// atomically at each change; health comes from probes and from what traffic
// reports. It gives out slots and engine connections and tells listeners of
// joins and leaves; it never chooses among workers.
//
// A worker is Ready while one of its servers is; ranks with servers of their
// own are in and out of the pools alone. A server that came up is asked what it
// is before it gets a request. A new process on the same address is a leave and
// a join (of the whole worker, whichever rank it was), and is known by its start
// time, its counters, its event sources, by the id that it has in hand-overs, or,
// where it shows none, by having refused connections; an outage without such
// evidence is only an outage.
package fleet
