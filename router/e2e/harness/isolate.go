package harness

import (
	"os"
	"path/filepath"
	"testing"
)

// NixlWheel returns the folder into which scripts/nixl-wheel.sh unpacks the pinned NIXL.
func NixlWheel(t *testing.T) string {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	dir := filepath.Join(cache, "nixl-1.5.1")
	if _, err := os.Stat(filepath.Join(dir, ".complete")); err != nil {
		msg := "no NIXL 1.5.1 in the cache: run scripts/nixl-wheel.sh"
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatal(msg)
		}
		t.Skip(msg)
	}
	return dir
}
