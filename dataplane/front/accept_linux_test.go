package front

import (
	"runtime"
	"testing"
	"time"
)

// A goroutine that never waits leaves the only processor to one for which something has
// come, each time it gives way. Without, Go looks into its poller after 10 ms.
func TestGiveWay(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	y, err := newCourtesy()
	if err != nil {
		t.Fatal(err)
	}
	defer y.close()
	other, client := linked(t)
	defer other.Close()
	defer client.Close()
	most := 0
	for range 100 {
		came := make(chan struct{})
		go func() {
			defer close(came)
			var one [1]byte
			if _, err := other.Read(one[:]); err != nil {
				t.Error(err)
			}
		}()
		time.Sleep(2 * time.Millisecond) // it waits in the poller
		if _, err := client.Write([]byte{'a'}); err != nil {
			t.Fatal(err)
		}
		turns := 0
		for waiting := true; waiting; turns++ {
			y.giveWay()
			select {
			case <-came:
				waiting = false
			default:
			}
		}
		most = max(most, turns)
	}
	if most > 20 {
		t.Errorf("it gave way %d times before another had its turn", most)
	}
}

// What ends it ends a wait, too, and takes no descriptor along.
func TestGiveWayEnds(t *testing.T) {
	y, err := newCourtesy()
	if err != nil {
		t.Fatal(err)
	}
	y.close()
	done := make(chan struct{})
	go func() { y.giveWay(); close(done) }()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
		t.Fatal("it waits after close")
	}
	(*courtesy)(nil).giveWay()
	(*courtesy)(nil).close()
}
