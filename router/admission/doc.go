// Package admission holds requests while no rank can start them soon, and decides their order.
//
// [Queue] is a plain data structure without a clock, goroutines or locks. Its requests are in queues,
// one for each pool of ranks that requests compete for. Within a pool the order is decided in three
// steps:
//
//   - Between priority classes it is strict: the highest class with a waiting request goes first. A class
//     with a minimum share receives credit for every token that another class is given while it waits,
//     and goes first while it has credit. What it has taken beyond that it repays also while it does not wait.
//   - Within a class, the tenant with the largest deficit goes first: that has been given the fewest
//     tokens to compute, by weight, against a clock that advances as those that always have waiting
//     requests are served. What a tenant has not used of its share is saved, up to the cost of some
//     requests, so that one below its share hardly waits for others that offer too much. What it has
//     been given beyond its share stays a debt while the class has waiting requests, also when the tenant
//     has none.
//   - Within a tenant, the request that must start first goes first. One that can no longer start in
//     time is late and goes behind those that can.
//
// The requests of a pool that may use the same ranks are a group. If no rank has capacity for the first of a
// group, the others of the group are passed over until the next sweep; the order of the rest is as above. Each
// group and class has a heap of its tenants, so that a sweep costs the number of groups and not of requests.
//
// The order of tenants is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with the saved
// shares as in the "sparse flows" of FQ-CoDel (RFC 8290). Deficit round robin gives the same shares
// to tenants that always have waiting requests, but keeps nothing for the others: a tenant at 80 % of
// its share then waits as if it had a slow engine of its own.
//
// The same three steps decide which request leaves a full queue (Queue.victim), after one between pools:
// those have equal parts of its bounds.
//
// Whether a rank can start a request is not decided here, but by Starter; the rule is
// schedule.Scheduler.CanStart. It keeps in the queue what would wait in an engine for longer than
// admission.engine_queue. It does not keep every request there that an engine cannot start at once: an
// engine with a full batch has as many more as are expected to get a place within half of that time,
// because a place that becomes free while no request waits in the engine stays empty for a step and the way
// to the router and back. So requests hardly wait here below saturation, and batches stay full above it. A
// request of the highest class pays for that: it may wait for half of engine_queue behind those that were
// sent ahead, or for an eighth once requests have waited for some seconds without a break.
//
// A request whose KV fits into no rank (NoRoom) lets others pass that need less, and small ones are not behind it in
// forecasts. What keeps it from waiting without end is the Starter's: it may keep a rank for the request.
//
// A request on hold is in the Queue and counts in its bounds, but is not dispatched before it is released:
// its session has no place among the active ones yet.
//
// [Controller] makes a Queue usable by goroutines that wait. One goroutine dispatches while anything
// waits, and none exists otherwise.
package admission
