//go:build !amd64 || race

package kvindex

import "sync/atomic"

// release stores a word that readers may load concurrently. A reader that sees a later store sees
// this one too.
func release(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

func release32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
