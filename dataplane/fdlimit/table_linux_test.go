package fdlimit

import (
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// FDSize of /proc/self/status is for how many there is room.
func TestGrowTable(t *testing.T) {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		t.Fatal(err)
	}
	GrowTable()
	b, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(string(b), "FDSize:")
	size, err := strconv.ParseUint(strings.Fields(after)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	if want := min(lim.Cur, tableSize); size < want {
		t.Errorf("room for %d descriptors, want %d", size, want)
	}
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range open {
		if n, _ := strconv.ParseUint(fd.Name(), 10, 64); n >= min(lim.Cur, tableSize)-1 {
			t.Errorf("descriptor %d is open", n)
		}
	}
}
