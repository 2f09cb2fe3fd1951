package obs

import "sync/atomic"

// counter is a count that only rises. The request path adds to it with one atomic addition; a
// scrape reads it.
type counter struct{ n atomic.Uint64 }

func (c *counter) Inc() { c.n.Add(1) }

// Add adds n, which must not be negative.
func (c *counter) Add(n int64) { c.n.Add(uint64(n)) }

func (c *counter) Get() uint64 { return c.n.Load() }
