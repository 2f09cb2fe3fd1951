// Package hotrestart passes listeners from process to process, so that a router is replaced
// while connections are accepted throughout: from systemd to the router (sd_listen_fds(3)),
// and from a router to its replacement (Start in the old process, Inherit in the new one).
// It also reports the service's state to systemd (Notify, sd_notify(3)).
//
// Parent and child talk over a socket pair, one line of JSON per message: the parent lists
// the descriptors, the child reports that it is ready, the parent answers "go". Before "go"
// the child accepts nothing. If the child fails, it has had no client and the parent
// continues.
//
// After "go" the parent may pass connections over a second socket pair (SendConnection, and
// AcceptConnections in the child), if the child's release supports it.
//
// The router's assembly calls this package. It knows nothing of what the listeners serve.
package hotrestart
