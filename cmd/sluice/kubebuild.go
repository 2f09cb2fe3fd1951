package main

import (
	"fmt"
	"os"
)

// There are two builds. Go links one binary for whatever it runs, and runs all of its
// packages' initialization; with the Kubernetes client, whose scheme has every type of every
// API group, a sidecar is resident with 48 MiB instead of 27 (docs/sidecar.md). So sluice is
// built without it (-tags nokube), and serve becomes sluice-kube, the whole, where
// kube.selector is set.

// kubeBinary is the whole build's name; it stands beside the other.
const kubeBinary = "sluice-kube"

// envBuild tells a build that another has become of which version that was.
const envBuild = "SLUICE_BECAME_FROM"

// checkBuild sees to it that a process which became this build was of the same version.
func checkBuild() error {
	parentVersion, became := os.LookupEnv(envBuild)
	if !became {
		return nil
	}
	if err := os.Unsetenv(envBuild); err != nil {
		return err
	}
	if parentVersion != version {
		return fmt.Errorf("%s is of version %s, and the sluice that it stands beside of %s; install both of one build", kubeBinary, version, parentVersion)
	}
	return nil
}
