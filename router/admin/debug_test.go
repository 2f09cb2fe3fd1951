package admin

import (
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// TestProfiles: `go tool pprof` reads what the admin listener serves. TestRoutesNeedToken covers
// the token.
func TestProfiles(t *testing.T) {
	f := start(t, nil)
	for _, k := range []struct{ path, sample string }{
		{"heap", "inuse_space/bytes"},
		{"goroutine", "goroutine/count"},
		{"profile?seconds=1", "samples/count"},
	} {
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://"+f.Addr()+"/debug/pprof/"+k.path, nil)
		if err != nil {
			t.Fatal(err)
		}
		bearer(testToken)(req)
		resp, err := f.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %d %s, %v", k.path, resp.StatusCode, body, err)
		}
		file := filepath.Join(t.TempDir(), "profile")
		if err := os.WriteFile(file, body, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command("go", "tool", "pprof", "-raw", file).CombinedOutput()
		if err != nil || !strings.Contains(string(out), k.sample) {
			t.Errorf("%s: %v; no %q in %.300s", k.path, err, k.sample, out)
		}
	}
	if status, _, body := f.call(t, "GET", "/debug/pprof/goroutine?debug=2", bearer(testToken)); status != 200 || !strings.Contains(body, "admin.(*Server).profile") {
		t.Errorf("goroutines as text: %d %.200s", status, body)
	}
	for path, want := range map[string]int{
		"cmdline": 404, "nothing": 404, "heap?debug=3": 400, "profile?seconds=0": 400, "profile?seconds=61": 400, "trace?seconds=x": 400,
	} {
		if status, _, body := f.call(t, "GET", "/debug/pprof/"+path, bearer(testToken)); status != want {
			t.Errorf("%s: %d %s, want %d", path, status, body, want)
		}
	}
}
