// Package fleet keeps the membership: which workers exist, what they are (role, models, ranks,
// block size, event sources), and whether each can accept requests.
//
// Fleet is the main type. Readers load a View, an immutable snapshot that is replaced atomically at
// each change. Health comes from probes and from the results of traffic. The fleet assigns slots
// and engine connections and calls listeners on joins and leaves; it never chooses among workers.
//
// A worker is Ready while one of its servers is. Ranks with their own servers enter and leave the
// pools independently. A server that becomes healthy is inspected before it gets a request. A new
// process at the same address is a leave and a join of the whole worker, whichever rank it was. It
// is recognised by its start time, its counters, its event sources, its engine id in hand-overs or,
// if it shows none of these, by having refused connections. An outage without such evidence is only
// an outage.
package fleet
