// Package notify receives the notifications by which LMCache's prefill workers report that a
// request's KV has reached its decode worker.
//
// Its main type is Listener, a bound ZMQ PULL socket (dataplane/zmtp) to which every
// tensor-parallel rank of a prefill worker pushes one message per request. The router's lmcache
// family registers an Expectation before it sends the prefill request. router/app opens and
// closes the Listener. A notification without an Expectation is kept for a limited time and in
// limited number. Reports of the sluice connector that arrive at the same socket are passed to
// Options.Report. The Listener never connects to a peer and never replies. Breakers remembers the prefill workers
// whose notifications do not arrive.
package notify
