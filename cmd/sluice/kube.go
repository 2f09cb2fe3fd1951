//go:build !nokube

package main

import (
	"time"

	"sluice/router/config"
)

// execKubeBuild does nothing, because this build has the Kubernetes client.
func execKubeBuild(*config.Config) error { return nil }

// kubeBuildError returns nil, because this build has the Kubernetes client.
func kubeBuildError(*config.Config, time.Duration) error { return nil }
