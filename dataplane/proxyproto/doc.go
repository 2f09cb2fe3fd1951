// Package proxyproto determines the client's address behind proxies and load balancers.
//
// Parse reads the PROXY protocol header, which precedes the first byte of a connection
// (haproxy's proxy-protocol.txt, versions 1 and 2). ForwardedChain evaluates X-Forwarded-For
// and Forwarded (RFC 7239), which come with each request. Package front calls both.
//
// The package believes only addresses in Networks. It opens no connection and allocates
// nothing for well-formed input.
package proxyproto
