//go:build linux && !race

package rawsocket

import "testing"

func TestSendVectorAllocatesNothing(t *testing.T) {
	a, b := pair(t)
	pieces, buf := [][]byte{[]byte("head"), make([]byte, 1000), []byte("}")}, make([]byte, 4096)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = SendVector(a, pieces)
		_, _ = Recv(b, buf)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
