//go:build !nokube

package app

import (
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKubeSource makes the source of pods.
func newKubeSource(conf config.Kube, _ error) (discovery.Source, error) { return kube.New(conf) }
