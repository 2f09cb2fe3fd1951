package obs

import (
	"maps"
	"sync"
	"sync/atomic"
)

// labelMap finds a series by its labels without a lock or an allocation. The first use of a label
// set copies the map. The code defines almost all labels, but some values come from engines
// (status codes), so the number of series is bounded. Label sets beyond the bound share the series
// that was added last.
type labelMap[K comparable, V any] struct {
	m        atomic.Pointer[map[K]*V]
	mu       sync.Mutex
	make     func(K) *V
	overflow *V
}

const maxSeries = 512

func (v *labelMap[K, V]) get(k K) *V {
	if m := v.m.Load(); m != nil {
		if s, ok := (*m)[k]; ok {
			return s
		}
	}
	return v.add(k)
}

func (v *labelMap[K, V]) add(k K) *V {
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.all()
	if s, ok := old[k]; ok {
		return s
	}
	if len(old) >= maxSeries {
		return v.overflow
	}
	s := new(V)
	if v.make != nil {
		s = v.make(k)
	}
	m := maps.Clone(old)
	if m == nil {
		m = map[K]*V{}
	}
	m[k] = s
	v.m.Store(&m)
	v.overflow = s
	return s
}

// all returns the current map, nil if it is empty. The caller must not modify it.
func (v *labelMap[K, V]) all() map[K]*V {
	if m := v.m.Load(); m != nil {
		return *m
	}
	return nil
}
