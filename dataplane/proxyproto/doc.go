// Package proxied says who the client is behind proxies and load balancers: by the
// PROXY protocol's header, which comes before the first byte of a connection
// (haproxy's proxy-protocol.txt, versions 1 and 2), and by X-Forwarded-For or
// Forwarded (RFC 7239), which come with each request. Parse and Chain are its main
// types' whole use; dataplane/front calls both.
//
// It never believes what anybody says but those in Networks, opens nothing, and
// allocates nothing for what is well formed.
package proxyproto
