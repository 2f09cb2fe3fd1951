// Package client is the Go client of the router's engine interface: preprocessed
// requests out, token ids back, many at once on one connection (docs/engine-api.md).
//
// Client is its main type. The router's own tests use it; it imports nothing of
// the router but the frames, and knows no scheduling.
package client
