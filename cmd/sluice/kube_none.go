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

// execKubeBuild replaces this program by the build that has the Kubernetes client if
// kube.selector is set. It uses exec, so the process keeps its id, arguments, environment and
// descriptors, and the parent process and clients see no difference. It returns nil if
// kube.selector is not set, and an error if the other build cannot be run; after a successful
// exec it does not return.
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

// kubeBuildError returns the reason why execKubeBuild would fail, or nil. It starts the other
// build to compare the versions, and waits for it for at most timeout.
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
			err = errors.New(strings.TrimSpace(string(said))) // checkBuild's message: the versions differ
		}
	}
	if err != nil {
		return fmt.Errorf("kube.selector is set, and this binary has no Kubernetes client: %w", cannotBecome(path, err))
	}
	return nil
}
