package membudget

import (
	"sync"
	"testing"
)

func TestBudget(t *testing.T) {
	b := NewBudget(100)
	if !b.Acquire(60) || !b.Acquire(40) || b.Acquire(1) || b.Used() != 100 {
		t.Errorf("used %d", b.Used())
	}
	b.Release(40)
	if b.Acquire(41) || !b.Acquire(40) || !b.Acquire(0) || !b.Acquire(-5) || b.Used() != 100 {
		t.Errorf("used %d", b.Used())
	}
	b.Release(100)
	b.Release(-1)
	if b.Acquire(101) || b.Acquire(1<<62) || b.Acquire(1<<63-1) || b.Used() != 0 {
		t.Errorf("used %d", b.Used())
	}
	if b.Peak() != 100 || b.Limit() != 100 || b.Refused() != 5 {
		t.Errorf("peak %d limit %d refused %d", b.Peak(), b.Limit(), b.Refused())
	}
	if none := NewBudget(-1); none.Acquire(1) || !none.Acquire(0) {
		t.Error("a negative budget leases")
	}
}

// The bytes in use never exceed the limit, and all are returned.
func TestBudgetConcurrent(t *testing.T) {
	const limit, workers, rounds = 1000, 8, 2000
	b := NewBudget(limit)
	var held struct {
		sync.Mutex
		n, most int64
	}
	var wg sync.WaitGroup
	for w := range int64(workers) {
		wg.Add(1)
		go func() {
			defer wg.Done()
			for i := range int64(rounds) {
				n := (w*31+i*17)%400 + 1
				if !b.Acquire(n) {
					continue
				}
				held.Lock()
				held.n += n
				held.most = max(held.most, held.n)
				held.Unlock()
				held.Lock()
				held.n -= n
				held.Unlock()
				b.Release(n)
			}
		}()
	}
	wg.Wait()
	if b.Used() != 0 || held.most > limit || b.Peak() > limit || b.Peak() < held.most {
		t.Errorf("used %d, held %d, peak %d, limit %d", b.Used(), held.most, b.Peak(), limit)
	}
}

// Bytes acquired from a part count in the whole budget, which bounds them.
func TestNewChild(t *testing.T) {
	b := NewBudget(100)
	one, other := b.NewChild(), b.NewChild()
	if !one.Acquire(60) || other.Acquire(50) || !other.Acquire(40) || b.Acquire(1) {
		t.Errorf("used %d + %d of %d", one.Used(), other.Used(), b.Used())
	}
	if one.Used() != 60 || other.Used() != 40 || b.Used() != 100 || other.Refused() != 1 {
		t.Errorf("used %d + %d of %d, refused %d", one.Used(), other.Used(), b.Used(), other.Refused())
	}
	if one.Release(60); one.Used() != 0 || b.Used() != 40 || !b.Acquire(60) {
		t.Errorf("used %d of %d", one.Used(), b.Used())
	}
}

// A lower bound takes nothing back, and gives nothing more.
func TestSetLimit(t *testing.T) {
	b := NewBudget(100)
	if !b.Acquire(80) {
		t.Fatal("80 of 100")
	}
	b.SetLimit(50)
	if b.Acquire(1) || b.Limit() != 50 || b.Used() != 80 {
		t.Errorf("limit %d, used %d", b.Limit(), b.Used())
	}
	b.Release(40)
	if !b.Acquire(10) || b.Acquire(1) {
		t.Errorf("used %d of 50", b.Used())
	}
	b.SetLimit(200)
	if !b.Acquire(150) {
		t.Error("150 more of 200")
	}
}

func TestCount(t *testing.T) {
	b := NewBudget(100)
	c := b.Count()
	if !c.Acquire(60) || c.Acquire(50) || !c.Acquire(40) || c.Used() != 100 || b.Used() != 100 {
		t.Errorf("taken %d, used %d", c.Used(), b.Used())
	}
	c.Release()
	c.Release()
	if c.Used() != 0 || b.Used() != 0 || !c.Acquire(1) {
		t.Errorf("taken %d, used %d", c.Used(), b.Used())
	}
	var none *Count
	if free := new(Count); !none.Acquire(1<<40) || !free.Acquire(1<<40) {
		t.Error("a count of no budget refuses")
	}
}
