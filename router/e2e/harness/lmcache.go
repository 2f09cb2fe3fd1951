package harness

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePort is a port that nobody listens at. It lies below the range that the
// system gives out by itself, so that no connection or listener of another test
// takes it before it is used.
func FreePort(t *testing.T) int {
	t.Helper()
	for range 200 {
		port := 20_000 + rand.IntN(12_000)
		if l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			l.Close()
			return port
		}
	}
	t.Fatal("no free port in 200 tries")
	return 0
}
