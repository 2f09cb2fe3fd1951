//go:build !nokube

package main

import (
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKube makes the source of pods.
func newKube(conf config.Kube) (discovery.Source, error) { return kube.New(conf) }

// becomeKube does nothing: this is the build that has the Kubernetes client.
func becomeKube(*config.Config) {}
