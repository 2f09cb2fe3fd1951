//go:build !nokube

package main

import (
	"time"

	"sluice/router/config"
)

// execKubeBuild does nothing: this is the build that has the Kubernetes client.
func execKubeBuild(*config.Config) error { return nil }

// kubeBuildError: nothing is missing in this build.
func kubeBuildError(*config.Config, time.Duration) error { return nil }
