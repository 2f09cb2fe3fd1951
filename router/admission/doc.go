// Package admission holds requests while no rank can start them soon, and decides their order.
//
// [Queue] is a plain data structure without a clock, goroutines or locks. Its requests are in queues,
// one for each pool of ranks that requests compete for. Within a pool the order is decided in three
// steps:
//
//   - Between priority classes it is strict: the highest class with a waiting request goes first. A class
//     with a minimum share receives credit for every token that another class is given while it waits,
//     and goes first while it has credit.
//   - Within a class, tenants take turns by deficit round robin over tokens to compute, by weight. A
//     tenant's requests may overdraw its deficit by one request; the debt is kept while the class has
//     waiting requests, also when the tenant has none.
//   - Within a tenant, the request that must start first goes first. One that can no longer start in
//     time is late and goes behind those that can.
//
// The turns follow Shreedhar and Varghese, "Efficient fair queueing using deficit round robin"
// (SIGCOMM 1995), in the variant in which a flow is served while its deficit is positive and charged
// afterwards, so that the size of the next request need not be known.
//
// [Controller] makes a Queue usable by goroutines that wait. One goroutine dispatches while anything
// waits, and none exists otherwise.
package admission
