//go:build nokube

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	"sluice/router/config"
	"sluice/router/discovery"
)

// notBecome is why becomeKube could not do its work.
var notBecome = errors.New("only sluice serve finds workers by it")

// newKube is called where becomeKube could not do its work, or was not to.
func newKube(config.Kube) (discovery.Source, error) {
	return nil, fmt.Errorf("kube.selector is set, and this binary has no Kubernetes client: %w", notBecome)
}

// becomeKube puts the build that has the Kubernetes client in this one's place where the
// configuration asks for it: the same process with the same arguments, environment and
// descriptors, so whoever started it or connects to it sees no difference. It comes back
// where it need not or cannot.
func becomeKube(cfg *config.Config) {
	if cfg.Kube.Selector == "" {
		return
	}
	self, err := os.Executable()
	path := filepath.Join(filepath.Dir(self), kubeBinary)
	if err == nil {
		err = syscall.Exec(path, os.Args, append(os.Environ(), envBuild+"="+version))
	}
	notBecome = fmt.Errorf("cannot run %q instead, which has: %w; want %s beside this file, as make build puts it", path, err, kubeBinary)
}
