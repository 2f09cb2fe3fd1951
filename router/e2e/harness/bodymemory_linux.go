package harness

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"
)

// MemoryOf returns the value of a line of /proc/PID/status, such as VmRSS, in bytes.
func (p *Process) MemoryOf(t *testing.T, name string) int {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.Cmd.Process.Pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, ok := strings.Cut(string(b), name+":")
	if !ok {
		t.Fatalf("the process is gone: %s", p.Stderr.Tail(2000))
	}
	kb, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kb << 10
}
