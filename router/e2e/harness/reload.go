package harness

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
)

// ReloadRouter is a router with a configuration file that a test edits.
type ReloadRouter struct {
	*Router
	t    *testing.T
	Path string
	Base string
}

// StartReloadRouter starts a router over the given engine URLs with a file of Base and more, and
// waits until all workers are ready. more is YAML that follows the list of workers: further workers
// of the list, or other top-level members.
func StartReloadRouter(t *testing.T, more string, engines ...string) *ReloadRouter {
	t.Helper()
	g := &ReloadRouter{t: t, Path: filepath.Join(t.TempDir(), "sluice.yaml")}
	g.Base = "listen: 127.0.0.1:0\nadmin: {listen: 127.0.0.1:0, token: test-token-0123456789, runtime_file: " + filepath.Join(t.TempDir(), "rt.json") + "}\ndiscovery: {file_poll_interval: 1h}\n" +
		"health: {interval: 50ms}\nworkers:\n"
	for i, url := range engines {
		g.Base += fmt.Sprintf("  - {id: w%d, url: %q}\n", i, url)
	}
	WriteFile(t, g.Path, g.Base+more)
	g.Router = LaunchConfigured(t, g.Path)
	testwait.UntilWithin(t, 20*time.Second, "all workers are ready", func() bool { return len(g.Fleet.View().Workers) == len(engines) && AllReady(g.Router) })
	return g
}

// ReloadWith writes Base and more to the file and reloads it over the admin API.
func (g *ReloadRouter) ReloadWith(more string) (status int, changes []config.Change, message string) {
	g.t.Helper()
	WriteFile(g.t, g.Path, g.Base+more)
	req, err := http.NewRequest("POST", "http://"+g.Admin.Addr()+"/admin/v1/reload", nil)
	if err != nil {
		g.t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer test-token-0123456789")
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	defer resp.Body.Close()
	var v struct {
		Changes []config.Change
		Error   struct{ Message string }
	}
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		g.t.Fatal(err)
	}
	return resp.StatusCode, v.Changes, v.Error.Message
}
