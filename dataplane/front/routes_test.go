package front

import (
	"strings"
	"testing"
)

// A former path is served like the present one, but the 404 message does not list it.
func TestFormerPaths(t *testing.T) {
	r, n := newRoutes(true), 0
	for i := range Endpoints {
		former := Endpoints[i].FormerPath
		if former == "" {
			continue
		}
		n++
		if found, ok := r.find([]byte(former)); !ok || found.endpoint != &Endpoints[i] || found.methods != methodsPost {
			t.Errorf("%s is not served as %s", former, Endpoints[i].Path)
		}
		if strings.Contains(r.known, former) || !strings.Contains(r.known, Endpoints[i].Path) {
			t.Errorf("the known routes are %s; want %s in them, without %s", r.known, Endpoints[i].Path, former)
		}
	}
	if n == 0 {
		t.Error("no endpoint has a former path")
	}
}
