//go:build cgo

package notify

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// TestReleasedSenders receives the notification of each LMCache release, encoded by the
// release's own class and sent by its own library (scripts/fixtures/lmcache.py).
func TestReleasedSenders(t *testing.T) {
	python, sources := lmcache(t)
	versions := []string{"0.3.3", "0.3.5", "0.3.7", "0.4.4", "0.4.7", "0.5.6"}
	if testing.Short() { // starts a Python process per release
		versions = versions[len(versions)-1:]
	}
	for _, version := range versions {
		t.Run(version, func(t *testing.T) {
			b := listen(t, Options{})
			cmd := exec.Command(python, "../../../scripts/fixtures/lmcache.py", "push", version, b.Endpoint(), sources)
			cmd.Env = append(os.Environ(), "PYTHONDONTWRITEBYTECODE=1")
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			if !bufio.NewScanner(out).Scan() {
				t.Fatal("the sender does not begin")
			}
			fmt.Fprintln(in, "before") // no Expectation is open yet
			for i := range 100 {
				id := fmt.Sprintf("req-%d", i)
				k := expect(t, b, id, 2)
				fmt.Fprintf(in, "%s\n%s\n", id, id)
				if err := k.Wait(within(20 * time.Second)); err != nil {
					t.Fatal(err)
				}
				k.Close()
			}
			if err := expect(t, b, "before", 1).Wait(within(time.Second)); err != nil {
				t.Error(err)
			}
			in.Close()
			if st := b.Stats(); st.Received != 201 || st.Malformed+st.OtherType != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}

// lmcache returns the Python and the files of the releases that scripts/connector-test.sh
// --setup installs. Without them the test is skipped, or fails if SLUICE_REQUIRE_NIXL requires
// the installation.
func lmcache(t *testing.T) (python, sources string) {
	t.Helper()
	cache := os.Getenv("SLUICE_CACHE")
	if cache == "" {
		home, _ := os.UserHomeDir()
		cache = filepath.Join(home, ".cache", "sluice")
	}
	venv := filepath.Join(cache, "connector-tests")
	sources = filepath.Join(venv, "lmcache")
	if _, err := os.Stat(filepath.Join(sources, "0.5.6")); err != nil {
		if os.Getenv("SLUICE_REQUIRE_NIXL") == "1" {
			t.Fatalf("no LMCache releases in the cache: run scripts/connector-test.sh --setup: %v", err)
		}
		t.Skipf("no LMCache releases in the cache: run scripts/connector-test.sh --setup: %v", err)
	}
	return filepath.Join(venv, "bin", "python"), sources
}
