//go:build !race && !invariants

package kvindex

import "sync/atomic"

const invariants = false

var jitters atomic.Uint32

func jitter() {}
