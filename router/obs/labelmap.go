package obs

import (
	"maps"
	"sync"
	"sync/atomic"
)

// labelMap finds a series by its labels without a lock or an allocation; a series
// seen for the first time costs a copy of the map. Labels come from the code's
// own vocabulary, but some pass through engines (status codes), so the number
// of series is bounded; what comes beyond shares the last one made.
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

// all is the present map; read only, nil at first.
func (v *labelMap[K, V]) all() map[K]*V {
	if m := v.m.Load(); m != nil {
		return *m
	}
	return nil
}
