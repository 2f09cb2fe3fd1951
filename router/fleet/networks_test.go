package fleet

import (
	"net/netip"
	"strings"
	"testing"

	"sluice/router/worker"
)

// Of a worker with networks, an event source that its engine names elsewhere is
// not followed.
func TestEventsMustLieInTheNetworks(t *testing.T) {
	loopback := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8")}
	for _, c := range []struct {
		endpoint, replay string
		ok               bool
	}{
		{"tcp://127.0.0.1:5557", "", true},
		{"tcp://127.0.0.1:5557", "tcp://127.0.0.2:5657", true},
		{"tcp://10.0.0.1:5557", "", false},
		{"tcp://127.0.0.1:5557", "tcp://10.0.0.1:5657", false},
		{"tcp://localhost:5557", "", false},
		{"ipc:///tmp/x", "", false},
		{"tcp://[::ffff:127.0.0.1]:5557", "", true},
	} {
		src := EventSource{Endpoint: c.endpoint, Replay: c.replay}
		if err := checkNetwork(loopback, src); (err == nil) != c.ok {
			t.Errorf("%s, %s: %v", c.endpoint, c.replay, err)
		}
		if err := checkNetwork(nil, src); err != nil {
			t.Errorf("without networks: %v", err)
		}
	}

	wide := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")}
	for endpoint, ok := range map[string]bool{"tcp://10.0.0.1:5557": true, "tcp://169.254.169.254:80": false, "tcp://127.0.0.1:5557": false, "tcp://0.0.0.0:5557": false, "tcp://224.0.0.1:5557": false} {
		if err := checkNetwork(wide, EventSource{Endpoint: endpoint}); (err == nil) != ok {
			t.Errorf("%s in a wide network: %v", endpoint, err)
		}
	}

	for _, host := range []string{"127.0.0.1", "10.9.9.9"} {
		e := newEngine(t)
		e.setModels(&e.events, strings.ReplaceAll(`{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://HOST:5557","replay_endpoint":null,"topic":""}}`, "HOST", host))
		f, _ := newFleet(t, Options{})
		mustAdd(t, f, worker.Spec{ID: "w", URL: e.url(), Networks: loopback})
		r := waitRanks(t, f, "tiny", 1).Aggregated[0]
		if _, ok := f.EventSource(r); ok != (host == "127.0.0.1") {
			t.Errorf("events reported at %s: followed %v", host, ok)
		}
	}
}
