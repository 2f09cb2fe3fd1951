package admin

import (
	"errors"
	"os"
	"strings"
	"testing"
	"time"
)

// TestIdentity: the route and the runtime file say which router this is, and the error about several
// routers lists what the runtime files say.
func TestIdentity(t *testing.T) {
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	f := start(t, func(o *Options) {
		o.RuntimeFile, o.ConfigPath, o.Version = "", "/etc/sluice/sluice.yaml", "1.2.3"
		o.ClientAddr = func() string { return "127.0.0.1:8080" }
	})
	id, err := f.client.Identity(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if id.Address != f.Addr() || id.Listen != "127.0.0.1:8080" || id.Config != "/etc/sluice/sluice.yaml" || id.PID != os.Getpid() ||
		id.Version != "1.2.3" || time.Since(id.Started) > time.Minute || id.UptimeS < 0 || id.UptimeS > 60 {
		t.Errorf("%+v", id)
	}
	other := Runtime{Address: "127.0.0.1:4", Token: "x", PID: os.Getpid(), Started: time.Now().Add(-time.Hour)}
	if err := WriteRuntimeFile(DefaultRuntimeFile(other.Address), other); err != nil {
		t.Fatal(err)
	}
	_, err = Find("")
	var several *AmbiguousError
	if !errors.As(err, &several) || len(several.Found) != 2 {
		t.Fatalf("%v", err)
	}
	for _, want := range []string{"--admin " + f.Addr() + "  (/etc/sluice/sluice.yaml, pid ", "--admin 127.0.0.1:4  (no configuration file, pid ", "up 1h0m0s"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
}
