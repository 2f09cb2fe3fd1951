// Package obs is what the router tells of itself in figures and lines: the
// metrics that /metrics shows and the setting-up of the log.
//
// Metrics is its one main type; it implements the observers that front,
// kvevents and disagg declare, so that those count without knowing it. What
// happens on a request's way is an atomic add to a counter found by rank or
// endpoint, never by a formatted name. Series of a rank live from RankAdded to
// RankRemoved and are gone from the next scrape. Every name stands in the catalog
// and in docs/metrics.md. It decides nothing and keeps no request.
package obs
