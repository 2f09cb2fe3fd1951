//go:build nokube

package app

import (
	"errors"
	"fmt"

	"sluice/router/config"
	"sluice/router/discovery"
)

// newKubeSource fails: this build has no Kubernetes client. The error says why the build
// that has one does not run instead.
func newKubeSource(_ config.Kube, why error) (discovery.Source, error) {
	if why == nil {
		why = errors.New("only sluice serve finds workers by it")
	}
	return nil, fmt.Errorf("kube.selector is set, and this binary has no Kubernetes client: %w", why)
}
