//go:build !nokube

package main

import (
	"time"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKube makes the source of pods.
func newKube(conf config.Kube) (discovery.Source, error) { return kube.New(conf) }

// becomeKube does nothing: this is the build that has the Kubernetes client.
func becomeKube(*config.Config) {}

// kubeFault: nothing is missing in this build.
func kubeFault(*config.Config, time.Duration) error { return nil }
