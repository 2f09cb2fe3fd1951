package obs

import (
	"maps"
	"sync"
	"sync/atomic"
)

// labelMap finds a series by its labels without a lock or an allocation. The first use of a label
// set copies the map. The code defines almost all label values, but some come from engines (status
// codes, models), so the number of series is bounded: label sets beyond the bound share one series.
type labelMap[K comparable, V any] struct {
	m  atomic.Pointer[map[K]*V]
	mu sync.Mutex
	// create returns a new series; nil: new(V).
	create func(K) *V
	// overflow returns the label set that stands for k beyond the bound; nil: the zero K.
	overflow func(k K) K
	bound    int // 0: maxSeries
}

// maxSeries bounds the series of a metric, those of ranks apart.
const maxSeries = 512

// otherValue is the value of a label whose values are too many.
const otherValue = "other"

func (v *labelMap[K, V]) get(k K) *V {
	if m := v.m.Load(); m != nil {
		if s, ok := (*m)[k]; ok {
			return s
		}
	}
	return v.add(k)
}

func (v *labelMap[K, V]) add(k K) *V {
	bound := v.bound
	if bound == 0 {
		bound = maxSeries
	}
	var other K
	if v.overflow != nil {
		other = v.overflow(k)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	old := v.all()
	if len(old) >= bound {
		k = other
	}
	if s, ok := old[k]; ok {
		return s
	}
	s := new(V)
	if v.create != nil {
		s = v.create(k)
	}
	m := maps.Clone(old)
	if m == nil {
		m = map[K]*V{}
	}
	m[k] = s
	v.m.Store(&m)
	return s
}

// all returns the current map, nil if it is empty. The caller must not modify it.
func (v *labelMap[K, V]) all() map[K]*V {
	if m := v.m.Load(); m != nil {
		return *m
	}
	return nil
}
