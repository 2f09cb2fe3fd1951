package harness

import (
	"fmt"
	"math/rand/v2"
	"net"
	"testing"
)

// FreePort returns a port on which nothing listens. It is below the system's ephemeral range, so
// that no connection or listener of another test gets it before the caller binds it.
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
