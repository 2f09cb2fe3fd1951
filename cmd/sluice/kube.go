//go:build !nokube

package main

import (
	"time"

	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/kube"
)

// newKubeSource makes the source of pods.
func newKubeSource(conf config.Kube) (discovery.Source, error) { return kube.New(conf) }

// execKubeBuild does nothing: this is the build that has the Kubernetes client.
func execKubeBuild(*config.Config) {}

// kubeBuildError: nothing is missing in this build.
func kubeBuildError(*config.Config, time.Duration) error { return nil }
