// Package obs collects the router's metrics, writes them for /metrics, and sets up its log.
//
// Metrics is the main type. It implements the observer interfaces that front, kvevents and pd
// declare, so these packages do not import obs. router/app creates it. On the request path a
// metric is one atomic addition to a counter that is found by rank or endpoint, never by a
// formatted name. The series of a rank exist from RankAdded to RankRemoved; the next scrape no
// longer has them. Every metric name is in the Catalog and in docs/metrics.md. A scrape (Gather)
// reads the counters and builds the families of client_golang from them, so the request path does
// not know of it. The number of series is bounded: labelMap, maxModels, maxKeys, maxRanks. The
// package makes no decisions and stores no requests.
package obs
