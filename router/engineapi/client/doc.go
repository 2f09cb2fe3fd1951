// Package client is the Go client of the router's engine API. It sends preprocessed requests
// and receives token ids, with many concurrent requests on one connection (docs/engine-api.md).
//
// Client is the main type. The router's own tests use it. Of the router the package imports
// only dataplane/wire, and it does not depend on scheduling.
package client
