package upstream

import (
	"net"
	"os"
	"testing"
	"time"
)

// TestDialAllocates: what is made for a connection and not kept lies between what streams
// keep. net's dialer makes some thirty objects.
func TestDialAllocates(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts: its queue is long enough
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	e, err := NewEndpoint("http://"+ln.Addr().String(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	var call Call
	allocs := testing.AllocsPerRun(50, func() {
		c, err := e.connect(&Request{}, &call)
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := c.nc.(*os.File); !ok {
			t.Fatalf("a %T, made by net's dialer", c.nc)
		}
		call.detach(&c.leg)
		e.open.Add(1)
		c.close()
	})
	if allocs > 10 && !raceEnabled {
		t.Errorf("a connection allocates %v times", allocs)
	}
	named, err := NewEndpoint("http://localhost:1", Options{ConnectTimeout: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	if named.direct.ok {
		t.Error("a name is dialled without a look-up")
	}
}
