package objpool

import (
	"reflect"
	"sync"
)

// Pool is a sync.Pool of *T. The zero value is ready; New, where it is set, makes an
// object when the pool has none. It is safe for concurrent use and must not be copied.
type Pool[T any] struct {
	New  func() *T
	pool sync.Pool
}

// Get lends an object: one that was released, else a new one; nil when there is neither a
// released one nor New.
func (p *Pool[T]) Get() *T {
	if x, _ := p.pool.Get().(*T); x != nil {
		if checksEnabled {
			checkObject(reflect.ValueOf(x).Elem(), true, reflect.TypeFor[T]().String())
		}
		return x
	}
	if p.New == nil {
		return nil
	}
	return p.New()
}

// Put releases an object; nobody may use it, or memory that is its own, from then on.
func (p *Pool[T]) Put(x *T) {
	if checksEnabled {
		checkObject(reflect.ValueOf(x).Elem(), false, "")
	}
	p.pool.Put(x)
}
