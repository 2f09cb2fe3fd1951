//go:build nokube

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"sluice/router/config"
)

// execKubeBuild puts the build that has the Kubernetes client in this one's place where the
// configuration asks for it: the same process with the same arguments, environment and
// descriptors, so the parent process and clients see no difference. It returns nil where
// that is not needed, and otherwise why it is not possible.
func execKubeBuild(cfg *config.Config) error {
	if cfg.Kube.Selector == "" {
		return nil
	}
	path, err := kubePath()
	if err == nil {
		err = syscall.Exec(path, os.Args, append(os.Environ(), envBuild+"="+version))
	}
	return cannotBecome(path, err)
}

func kubePath() (string, error) {
	self, err := os.Executable()
	return filepath.Join(filepath.Dir(self), kubeBinary), err
}

func cannotBecome(path string, err error) error {
	return fmt.Errorf("cannot run %q instead, which has: %w; make build makes both files, install %s beside this one (or build it there: go build -o %s ./cmd/sluice)", path, err, kubeBinary, path)
}

// kubeBuildError says why serve could not become the build that has the Kubernetes client; nil:
// it could, or need not.
func kubeBuildError(cfg *config.Config, timeout time.Duration) error {
	if cfg.Kube.Selector == "" {
		return nil
	}
	path, err := kubePath()
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		cmd := exec.CommandContext(ctx, path, "version")
		cmd.Env = append(os.Environ(), envBuild+"="+version)
		var said []byte
		if said, err = cmd.CombinedOutput(); err != nil && len(said) > 0 {
			err = errors.New(strings.TrimSpace(string(said))) // it is of another build
		}
	}
	if err != nil {
		return fmt.Errorf("kube.selector is set, and this binary has no Kubernetes client: %w", cannotBecome(path, err))
	}
	return nil
}
