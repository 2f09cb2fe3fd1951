// Package kvtransfer receives the engines' reports of KV transfers and tells the router how
// each transfer ended.
//
// Its main type is Watcher. A Watcher runs the tiers that carry reports: a NIXL agent with its
// completion board, a UCX worker for active messages and a ZMQ PULL socket. Below them is the
// http tier, the engines' HTTP answers, which always works. The Watcher describes the endpoints
// to connectors (Document) and gives router/pd a Transfer for each hand-over.
//
// router/app starts the Watcher, router/pd opens transfers, registration serves the document,
// obs and admin show tiers and rates. When a tier fails, transfers that are open receive no
// further reports from it, and the engines' HTTP answers decide as they do without a tier. The
// package never sends a request to an engine and never chooses a worker.
package kvtransfer
