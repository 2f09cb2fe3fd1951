package harness

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"sluice/router/admin"
)

// RuntimeOf reads the runtime file of the process that was started with dir as its runtime
// directory. It ends the test unless there is exactly one such file.
func RuntimeOf(t *testing.T, dir string) admin.Runtime {
	t.Helper()
	files, _ := filepath.Glob(filepath.Join(dir, "sluice-*", "*.json"))
	if len(files) != 1 {
		t.Fatalf("runtime files: %v", files)
	}
	rt, err := admin.ReadRuntimeFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	return rt
}

// IsRunning reports whether a process exists and is not a zombie.
func IsRunning(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	at := bytes.LastIndexByte(stat, ')')
	return at < 0 || at+2 >= len(stat) || stat[at+2] != 'Z'
}
