package nixl

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// wheelDir is where scripts/nixl-wheel.sh unpacks a version of NIXL.
func wheelDir(version string) string {
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	return filepath.Join(cache, "nixl-"+version)
}

// realNIXL is the search for the wheel the tests run on. Without it the test is
// skipped, or fails where SLUICE_REQUIRE_NIXL asks for it.
func realNIXL(t testing.TB) Search {
	t.Helper()
	return realVersion(t, "1.5.1")
}

func realVersion(t testing.TB, version string) Search {
	t.Helper()
	dir := wheelDir(version)
	if _, err := os.Stat(filepath.Join(dir, ".complete")); err != nil {
		msg := "no NIXL " + version + " in the cache: run scripts/nixl-wheel.sh " + version
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatal(msg)
		}
		t.Skip(msg)
	}
	return Search{Path: dir}
}

func TestRealLoad(t *testing.T) {
	l, err := Load(realNIXL(t), loadLimit)
	if err != nil {
		t.Fatal(err)
	}
	if l.NIXL != "1.5.1" || !strings.HasSuffix(l.Path, "libnixl_capi.so") {
		t.Errorf("loaded %+v; want NIXL 1.5.1's libnixl_capi.so", l)
	}
	again, err := Load(realNIXL(t), loadLimit)
	if err != nil || again.Path != l.Path {
		t.Errorf("loading again gave %+v, %v; want the same file", again, err)
	}
}
