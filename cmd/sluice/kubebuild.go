package main

import (
	"fmt"
	"os"
)

// There are two builds, because a Go binary initializes every package that is linked into it.
// The scheme of the Kubernetes client registers every type of every API group: with it a
// sidecar's resident memory is 48 MiB instead of 27 MiB (docs/sidecar.md). The binary sluice is
// therefore built without the client (-tags nokube). If kube.selector is set, serve executes
// sluice-kube, the build with the client.

// kubeBinary is the file name of the build with the Kubernetes client. It is installed in the
// same folder as sluice.
const kubeBinary = "sluice-kube"

// envBuild is the environment variable in which sluice passes its version to sluice-kube.
const envBuild = "SLUICE_BECAME_FROM"

// checkBuild returns an error if sluice of another version executed this build.
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
