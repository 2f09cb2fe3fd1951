//go:build !amd64 || race

package kvindex

import "sync/atomic"

// release stores a word that readers may be looking at, so that whoever sees what is
// stored after it sees it too.
func release(p *uint64, v uint64) { atomic.StoreUint64(p, v) }

func release32(p *uint32, v uint32) { atomic.StoreUint32(p, v) }
