//go:build !nokube

package main

import (
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKube makes the source of pods; -tags nokube leaves client-go out.
func newKube(conf config.Kube) (discovery.Source, error) { return kube.New(conf) }
