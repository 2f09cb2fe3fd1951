package harness

import (
	"net"
	"strconv"
	"strings"
	"testing"
	"time"
)

// Dialed connects to a TCP address, within 20 s, and ends the test if it cannot. The connection has
// a deadline of 2 minutes for all reads and writes and is closed when the test ends.
func Dialed(t *testing.T, addr string) net.Conn {
	t.Helper()
	nc, err := net.DialTimeout("tcp", addr, 20*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nc.Close() })
	_ = nc.SetDeadline(time.Now().Add(2 * time.Minute))
	return nc
}

// SeriesValue returns the sum of the series of a metrics page whose lines begin with prefix.
func SeriesValue(page, prefix string) (sum float64) {
	for line := range strings.Lines(page) {
		if strings.HasPrefix(line, prefix) {
			f := strings.Fields(line)
			v, _ := strconv.ParseFloat(f[len(f)-1], 64)
			sum += v
		}
	}
	return sum
}
