package discovery

import (
	"strings"

	"sluice/router/worker"
)

// IDOf is the id a spec has in the fleet: its own, or role@HOST:PORT, which is
// the same each time the same worker is found.
func IDOf(spec worker.Spec) string {
	if spec.ID != "" {
		return spec.ID
	}
	_, host, _ := strings.Cut(strings.TrimRight(spec.URL, "/"), "://")
	return spec.Role.String() + "@" + strings.ReplaceAll(host, "/", "_")
}
