//go:build nokube

package main

import (
	"errors"

	"sluice/router/config"
	"sluice/router/discovery"
)

func newKube(config.Kube) (discovery.Source, error) {
	return nil, errors.New("kube.selector is set, but this binary was built without Kubernetes (-tags nokube)")
}
