//go:build !nokube

package app

import (
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKubeSource returns the discovery source that finds workers by a pod selector.
func newKubeSource(conf config.Kube, _ error) (discovery.Source, error) { return kube.New(conf) }
