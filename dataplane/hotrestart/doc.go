// Package takeover passes listeners from process to process, so that a router is
// replaced without a moment in which nobody accepts: from systemd to the router
// (sd_listen_fds(3)), and from a router to the one that it starts in its own place
// (Start, and Inherit on the other side). It also tells systemd how the service is
// doing (Notify, sd_notify(3)). cmd calls it; it knows nothing of what is served.
//
// The two processes speak over a socket pair, a line of JSON each way: the old one
// says which descriptor is what, the new one that it is ready, the old one "go".
// Before "go" the new process accepts nothing, so that one which fails has had no
// client, and the old one goes on as if nothing had been.
//
// Behind "go" the old process may pass connections, over a socket pair of their own (Pass,
// and Connections on the other side), unless the new one is of a release that takes none.
package hotrestart
