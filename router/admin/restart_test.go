package admin

import (
	"errors"
	"strings"
	"testing"
)

func TestRestart(t *testing.T) {
	f := start(t, nil)
	if pid, err := f.client.Restart(t.Context()); err != nil || pid != 4711 {
		t.Errorf("process %d, %v", pid, err)
	}
	f.restartFails = errors.New("listen: 0.0.0.0:x is not an address")
	if _, err := f.client.Restart(t.Context()); err == nil || !strings.Contains(err.Error(), "is not an address") {
		t.Errorf("a restart that failed: %v", err)
	}
}
