//go:build nokube

package app

import (
	"errors"
	"fmt"

	"sluice/router/config"
	"sluice/router/discovery"
)

// newKubeSource fails, because this build has no Kubernetes client. Its error wraps why: the
// reason why the build that has the client does not run instead.
func newKubeSource(_ config.Kube, why error) (discovery.Source, error) {
	if why == nil {
		why = errors.New("only sluice serve finds workers by it")
	}
	return nil, fmt.Errorf("kube.selector is set, and this binary has no Kubernetes client: %w", why)
}
