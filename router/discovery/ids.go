package discovery

import (
	"strings"

	"sluice/router/worker"
)

// IDOf returns the id of a spec's worker in the fleet: spec.ID, or role@HOST:PORT if that is
// empty. The id is the same each time a source finds the same worker.
func IDOf(spec worker.Spec) string {
	if spec.ID != "" {
		return spec.ID
	}
	_, host, _ := strings.Cut(strings.TrimRight(spec.URL, "/"), "://")
	return spec.Role.String() + "@" + strings.ReplaceAll(host, "/", "_")
}
