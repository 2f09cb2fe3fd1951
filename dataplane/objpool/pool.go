package objpool

import (
	"reflect"
	"sync"
)

// Pool is a sync.Pool of *T. The zero value is ready to use. It is safe for concurrent use
// and must not be copied.
type Pool[T any] struct {
	New  func() *T // makes an object if the pool has none; may be nil
	pool sync.Pool
}

// Get returns a released object, or else a new one. It returns nil if the pool is empty and
// New is nil. The caller owns the object until it calls Put.
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

// Put releases x. The caller must not use x, or memory that belongs to x, afterwards.
func (p *Pool[T]) Put(x *T) {
	if checksEnabled {
		checkObject(reflect.ValueOf(x).Elem(), false, "")
	}
	p.pool.Put(x)
}
