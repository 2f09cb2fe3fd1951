package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"log/slog"
	"maps"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

type members struct {
	mu      sync.Mutex
	in      map[string]worker.Spec
	removed []string
}

func (m *members) Add(s worker.Spec) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if _, there := m.in[s.ID]; there {
		return fmt.Errorf("%q is there", s.ID)
	}
	m.in[s.ID] = s
	return nil
}

func (m *members) Remove(id string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.in, id)
	m.removed = append(m.removed, id)
	return nil
}

// String lists the members as "id role url".
func (m *members) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, id := range slices.Sorted(maps.Keys(m.in)) {
		out = append(out, id+" "+m.in[id].Role.String()+" "+m.in[id].URL)
	}
	return strings.Join(out, ", ")
}

// logs collects the log of a source.
type logs struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// runningSource is a running source with the workers that it has added.
type runningSource struct {
	*members
	logs  *logs
	state func() discovery.State
}

// start runs a source against a. It uses goodToken unless mod changes the configuration, and
// checks that the log contains no token.
func start(t *testing.T, a *apiServer, mod func(*config.Kube), tune func(*Source)) *runningSource {
	t.Helper()
	conf := config.Default().Kube
	conf.Selector = "app in (prefill,decode)"
	if a.Certificate() != nil {
		conf.Kubeconfig = a.kubeconfig(t, "token: "+goodToken)
	}
	if mod != nil {
		mod(&conf)
	}
	src, err := New(conf)
	if err != nil {
		t.Fatal(err)
	}
	if tune != nil {
		tune(src)
	}
	s := &runningSource{members: &members{in: map[string]worker.Spec{}}, logs: new(logs)}
	run := discovery.NewRunner(s.members, slog.New(slog.NewTextHandler(s.logs, &slog.HandlerOptions{Level: slog.LevelDebug})))
	s.state = func() discovery.State { return run.States()[0] }
	t.Cleanup(func() {
		done := make(chan struct{})
		go func() { defer close(done); run.Close() }()
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			t.Error("it does not end")
		}
		for _, secret := range []string{goodToken, badToken} {
			if strings.Contains(s.logs.String()+s.state().Error, secret) {
				t.Errorf("a token is in the log:\n%s", s.logs)
			}
		}
		if t.Failed() {
			t.Logf("log:\n%s", s.logs)
		}
	})
	if err := run.Start(src); err != nil {
		t.Fatal(err)
	}
	return s
}

// servers are the variants of API servers.
var servers = []struct {
	name string
	mod  func(*apiServer)
}{
	{"HTTP/2", nil},
	{"HTTP/2, short pages", func(a *apiServer) { a.page = 1 }},
	{"HTTP/1.1", func(a *apiServer) { a.EnableHTTP2 = false }},
}

func forEachServer(t *testing.T, test func(*testing.T, *apiServer)) {
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			test(t, newAPI(t, s.mod))
		})
	}
}

func TestPodsComeAndGo(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
		a.change(added, newPod("web", "frontend", "10.0.0.9"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "the first is in", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		a.change(added, with(newPod("d-0", "decode", ""), func(p *testPod) { p.phase, p.ready = "Pending", false }))
		a.change(modified, with(newPod("d-0", "decode", "10.0.0.2"), func(p *testPod) { p.ready = false }))
		a.change(added, newPod("d-1", "decode", "fd00::5"))
		testwait.Until(t, "the ready one is in", func() bool {
			return s.String() == "d-1 decode http://[fd00::5]:8000, p-0 prefill http://10.0.0.1:8000"
		})
		a.change(modified, newPod("d-0", "decode", "10.0.0.2"))
		testwait.Until(t, "the other is ready", func() bool { return strings.HasPrefix(s.String(), "d-0 decode http://10.0.0.2:8000,") })
		a.change(modified, with(newPod("d-0", "decode", "10.0.0.2"), func(p *testPod) { p.deleting = true }))
		a.change(deleted, newPod("d-1", "decode", "fd00::5"))
		testwait.Until(t, "one ends, one has gone", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		if st := s.state(); st.Error != "" || st.Workers != 1 {
			t.Errorf("%+v", st)
		}
		if a.count("list") != 1 {
			t.Errorf("%+v; want one list", a.calls)
		}
		a.set(func() {
			for _, c := range a.calls {
				if proto := map[bool]string{true: "HTTP/2.0", false: "HTTP/1.1"}[a.EnableHTTP2]; c.selector != "app in (prefill,decode)" || c.proto != proto {
					t.Errorf("%+v; want the selector and %s", c, proto)
				}
			}
		})
	})
}

// awaitWatch waits until a watch has delivered an event.
func (s *runningSource) awaitWatch(t *testing.T, a *apiServer) {
	t.Helper()
	testwait.Until(t, "there is a watch", func() (open bool) { a.set(func() { open = a.open > 0 }); return open })
	before := s.String()
	a.change(added, newPod("a-moment", "decode", "10.9.9.9"))
	testwait.Until(t, "it brings one", func() bool { return s.String() != before })
	a.change(deleted, newPod("a-moment", "decode", "10.9.9.9"))
	testwait.Until(t, "and takes it", func() bool { return s.String() == before })
}

// TestDroppedWatchResumes checks that a new watch resumes at the old one's position after a lost
// connection: it delivers the changes in between, without a new list.
func TestDroppedWatchResumes(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "it is in", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		lists := a.count("list")
		for i, byForce := range []bool{true, false} {
			s.awaitWatch(t, a)
			var stood int
			a.set(func() { stood = a.version })
			watches := a.count("watch")
			back := a.stop(byForce)
			a.change(deleted, newPod(fmt.Sprint("p-", i), "prefill", fmt.Sprint("10.0.0.", 1+i)))
			a.change(added, newPod(fmt.Sprint("p-", i+1), "prefill", fmt.Sprint("10.0.0.", 2+i)))
			back()
			want := fmt.Sprintf("p-%d prefill http://10.0.0.%d:8000", i+1, i+2)
			testwait.Until(t, "what happened meanwhile is there: "+want, func() bool { return s.String() == want })
			if n := a.count("list"); n != lists {
				t.Errorf("%d lists after the watch was dropped; want the %d of before", n, lists)
			}
			if a.count("watch") == watches {
				t.Fatal("no new watch")
			}
			a.set(func() {
				if last := a.calls[len(a.calls)-1]; last.kind != "watch" || last.version != fmt.Sprint(stood) {
					t.Errorf("the last call is %+v; want a watch from %d on", last, stood)
				}
			})
		}
	})
}

// TestGoneRelists checks that the source lists again if the server has discarded the watch's
// position (410 as a status, or as an event of the watch): the pods that went in between are removed,
// those that came are added, and the others stay.
func TestGoneRelists(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
		a.change(added, newPod("stays", "decode", "10.0.1.1"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "it is in", func() bool {
			return s.String() == "p-0 prefill http://10.0.0.1:8000, stays decode http://10.0.1.1:8000"
		})
		for i, head := range []bool{false, true} {
			s.awaitWatch(t, a)
			lists, gone := a.count("list"), a.count("gone")
			a.set(func() { a.goneHead = head })
			back := a.stop(false)
			a.change(deleted, newPod(fmt.Sprint("p-", i), "prefill", "10.0.0.1"))
			a.change(added, newPod(fmt.Sprint("p-", i+1), "prefill", fmt.Sprint("10.0.0.", i+2)))
			a.forget()
			back()
			want := fmt.Sprintf("p-%d prefill http://10.0.0.%d:8000, stays decode http://10.0.1.1:8000", i+1, i+2)
			testwait.Until(t, "the new state is there: "+want, func() bool { return s.String() == want })
			if a.count("gone") == gone || a.count("list") == lists {
				t.Errorf("410 as a status %v: %+v; want a watch that was refused, and a list after it", head, a.calls)
			}
			testwait.Until(t, "it is well", func() bool { return s.state().Error == "" })
		}
		if slices.Contains(s.members.removed, "stays") {
			t.Errorf("removed: %v; want no pod that exists", s.members.removed)
		}
		if strings.Contains(s.logs.String(), "level=ERROR") {
			t.Error("what is in the order of things was logged as a fault")
		}
	})
}

// TestRefusedCredentials checks that the error names rejected credentials and the server that
// rejected them, and that the source tries again.
func TestRefusedCredentials(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	var path string
	s := start(t, a, func(k *config.Kube) { path = a.kubeconfig(t, "token: "+badToken); k.Kubeconfig = path }, nil)
	testwait.Until(t, "the failure is shown", func() bool { return s.state().Error != "" })
	for _, want := range []string{"401", "nauthorized", a.URL, path, "app in (prefill,decode)", "namespace engines", "want a valid token or certificate"} {
		if err := s.state().Error; !strings.Contains(err, want) {
			t.Errorf("no %q in %q", want, err)
		}
	}
	testwait.Until(t, "it was tried again", func() (again bool) {
		a.set(func() { again = a.unknown > 4 })
		return again
	})
	if n := strings.Count(s.logs.String(), "(401)"); n != 1 || s.String() != "" {
		t.Errorf("the same failure is in the log %d times; in: %s", n, s)
	}
	a.set(func() { a.token = badToken })
	testwait.Until(t, "it is in once they are good", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" && s.state().Error == "" })
}

// TestForbiddenForAWhile checks that an unavailable cluster removes no worker, and that State has
// the error until the cluster is available again.
func TestForbiddenForAWhile(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	s := start(t, a, nil, nil)
	testwait.Until(t, "it is in", func() bool { return s.String() != "" })
	a.set(func() { a.denied = 403; a.cutWatches() })
	testwait.Until(t, "the failure is shown", func() bool {
		err := s.state().Error
		return strings.Contains(err, "cannot list resource") && strings.Contains(err, "want a role")
	})
	if s.String() == "" {
		t.Error("it is out though nobody said so")
	}
	a.set(func() { a.denied = 0 })
	testwait.Until(t, "it is well again", func() bool { return s.state().Error == "" })
}

// TestServerThatDoesNotAnswer checks that State reports a server which accepts calls without
// responding, and that the source waits for it.
func TestServerThatDoesNotAnswer(t *testing.T) {
	t.Parallel()
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t, s.mod)
			a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
			back := a.stop(false)
			s := start(t, a, nil, func(s *Source) { s.responseTimeout = time.Second })
			testwait.Until(t, "the error is reported", func() bool { return strings.Contains(s.state().Error, "no answer for 1s") })
			back()
			testwait.Until(t, "it is in after all, and well", func() bool { return s.String() != "" && s.state().Error == "" })
		})
	}
}

// TestServerIsDown checks that State has an error while nothing listens at the server's address.
func TestServerIsDown(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	s := start(t, a, nil, nil)
	testwait.Until(t, "it is in", func() bool { return s.String() != "" })
	a.Listener.Close()
	a.CloseClientConnections()
	testwait.Until(t, "the error is reported", func() bool { return strings.Contains(s.state().Error, a.URL) })
	if s.String() == "" {
		t.Error("it is out though nobody said so")
	}
}

func TestNamesPortsAndModels(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.change(added, with(newPod("p-0", "p", "10.0.0.1"), func(p *testPod) {
		p.labels = map[string]string{"app": "prefill", "tier": "first", "model": "tiny"}
	}))
	a.change(added, with(newPod("x", "decode", "10.0.0.2"), func(p *testPod) {
		p.namespace, p.annotations = "other", map[string]string{"model": "org/huge"}
	}))
	portless := func(name string) testPod {
		return with(newPod(name, "decode", "10.0.0.3"), func(p *testPod) { p.portless = true })
	}
	a.change(added, portless("bad"))
	s := start(t, a, func(k *config.Kube) {
		k.Namespace, k.Port, k.RoleLabel, k.PrefillValues, k.ModelLabel = "*", "http", "tier", []string{"first"}, "model"
		k.Worker = &config.Worker{Engine: "vllm", Ranks: []uint16{0, 1}, KVEvents: []string{"tcp://*:5557"}}
	}, nil)
	testwait.Until(t, "both are in", func() bool {
		return s.String() == "engines.p-0 prefill http://10.0.0.1:9000, other.x aggregated http://10.0.0.2:9000"
	})
	s.mu.Lock()
	p, x := s.in["engines.p-0"], s.in["other.x"]
	s.mu.Unlock()
	if p.Models[0] != "tiny" || x.Models[0] != "org/huge" || p.Engine != "vllm" || len(p.Ranks) != 2 || p.KVEvents[0] != "tcp://*:5557" || p.Source != "kube" {
		t.Errorf("%+v\n%+v", p, x)
	}
	testwait.Until(t, "the pod without the port is named", func() bool {
		return strings.Contains(s.state().Error, "engines/bad") && strings.Contains(s.state().Error, `"http"`)
	})
	a.change(added, portless("worse"))
	testwait.Until(t, "the other is counted", func() bool { return strings.Contains(s.state().Error, "1 other") })

	// The error stays while other pods change, and it is not logged again.
	mentions := strings.Count(s.logs.String(), "engines/bad")
	a.change(deleted, with(newPod("x", "decode", "10.0.0.2"), func(p *testPod) { p.namespace = "other" }))
	testwait.Until(t, "one is out", func() bool { return s.String() == "engines.p-0 prefill http://10.0.0.1:9000" })
	if n := strings.Count(s.logs.String(), "engines/bad"); n != mentions || !strings.Contains(s.state().Error, "engines/bad") {
		t.Errorf("logged %d times, then %d; now %+v", mentions, n, s.state())
	}
	a.change(deleted, portless("bad"))
	a.change(deleted, portless("worse"))
	testwait.Until(t, "all is well", func() bool { return s.state().Error == "" })
}

func TestNewReportsErrors(t *testing.T) {
	for name, c := range map[string]struct {
		conf config.Kube
		want string
	}{
		"selector":   {config.Kube{Selector: "app in ("}, "kube.selector"},
		"kubeconfig": {config.Kube{Selector: "app=x", Kubeconfig: "/nowhere"}, "/nowhere"},
		"no cluster": {config.Kube{Selector: "app=x"}, "kube.kubeconfig"},
	} {
		if _, err := New(c.conf); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestBrokenKubeconfigKeepsItsSecrets checks that the error of an unusable kubeconfig names the
// file but contains nothing of its content.
func TestBrokenKubeconfigKeepsItsSecrets(t *testing.T) {
	for name, text := range map[string]string{
		"no YAML":      "{apiVersion: v1, users: [{name: u, user: {token: " + goodToken,
		"wrong type":   "{apiVersion: v1, kind: Config, users: [{name: u, user: " + goodToken + "}]}",
		"no server":    "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {token: " + goodToken + "}}], contexts: [{name: c, context: {user: u}}]}",
		"wrong server": "{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: k, cluster: {server: 'https://u:" + goodToken + "@[::'}}], users: [{name: u, user: {token: " + goodToken + "}}], contexts: [{name: c, context: {cluster: k, user: u}}]}",
	} {
		path := filepath.Join(t.TempDir(), "config")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := New(config.Kube{Selector: "app=x", Kubeconfig: path})
		if err == nil || strings.Contains(err.Error(), goodToken) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want an error with %s and without the token", name, err, path)
		}
	}
	for host, want := range map[string]string{
		"https://u:secret@api.example:6443/x": "https://api.example:6443",
		"api.example:6443":                    "https://api.example:6443",
		"http://[fd00::1]:8080":               "http://[fd00::1]:8080",
	} {
		path := filepath.Join(t.TempDir(), "config")
		writeFile(t, path, fmt.Sprintf("{current-context: c, clusters: [{name: k, cluster: {server: %q}}], contexts: [{name: c, context: {cluster: k}}]}", host))
		if s, err := New(config.Kube{Selector: "app=x", Kubeconfig: path}); err != nil || s.server != want {
			t.Errorf("%s is shown as %+v, %v; want %q", host, s, err, want)
		}
	}
}

// TestSelectors checks the form that a selector must have.
func TestSelectors(t *testing.T) {
	for selector, want := range map[string]bool{
		"app": true, "!app": true, "app=x": true, "app == x": true, "app!=x": true, "app=": true, "a.b/c-d in (x, y),tier notin (z)": true,
		"app in (prefill,decode)": true, "n>3": true, " app = x , tier ": true,
		"": false, "app in (": false, "app in x": false, "app=x y": false, "app=x,": false, "app=a/b": false, "-app": false, "app<x": false,
	} {
		if selectorForm.MatchString(selector) != want {
			t.Errorf("%q: valid %v; want %v", selector, !want, want)
		}
	}
}

// TestBookmarksMoveThePosition checks that a watch resumes at the position of the last bookmark, also
// if no pod of the selector has changed for so long that the server has discarded what was before.
func TestBookmarksMoveThePosition(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "it is in", func() bool { return s.String() != "" })
		a.change(added, newPod("web", "frontend", "10.0.0.9")) // only a bookmark reports it
		testwait.Until(t, "the bookmark is sent", func() (sent bool) { a.set(func() { sent = a.reported == a.version }); return sent })
		var at string
		watches := a.count("watch")
		a.set(func() { a.oldest, a.log, at = a.version, nil, fmt.Sprint(a.version); a.cutWatches() })
		testwait.Until(t, "there is another watch", func() bool { return a.count("watch")+a.count("gone") > watches })
		a.set(func() {
			if last := a.calls[len(a.calls)-1]; last.kind != "watch" || last.version != at {
				t.Errorf("the last call is %+v; want a watch from %s on", last, at)
			}
		})
	})
}

// TestShortWatchesBackOff checks that watches which the server ends at once are repeated after delays
// that grow.
func TestShortWatchesBackOff(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.endAt = true
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	s := start(t, a, nil, nil)
	testwait.Until(t, "there are three watches", func() bool { return a.count("watch") >= 3 })
	began := time.Now()
	testwait.Until(t, "there are five", func() bool { return a.count("watch") >= 5 })
	// The third and fourth delay are at least 1 s and 2 s with jitter. Load makes them longer only.
	if d := time.Since(began); d < 2*time.Second {
		t.Errorf("the fourth and fifth watch came within %v; want 2 s or more", d)
	}
	if a.count("list") != 1 || s.state().Error != "" {
		t.Errorf("%d lists, error %q; want one list and no error", a.count("list"), s.state().Error)
	}
}

// TestServerDownAtStart checks that a source starts without its API server, reports that, and adds the
// pods once the server is there.
func TestServerDownAtStart(t *testing.T) {
	t.Parallel()
	held, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	held.Close()
	var s *runningSource
	a := newAPI(t, func(a *apiServer) {
		a.Listener.Close()
		a.URL = "https://" + held.Addr().String()
		s = start(t, a, func(k *config.Kube) { k.Kubeconfig = insecureConfig(t, a.URL) }, nil)
		testwait.Until(t, "the error is reported", func() bool {
			return strings.Contains(s.state().Error, held.Addr().String()+": connect: connection refused")
		})
		a.URL = ""
		if a.Listener, err = net.Listen("tcp", held.Addr().String()); err != nil {
			t.Skipf("another process took the port: %v", err)
		}
	})
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	testwait.Until(t, "it is in, and well", func() bool { return s.String() != "" && s.state().Error == "" })
}

// insecureConfig writes a kubeconfig that does not check the server's certificate.
func insecureConfig(t *testing.T, url string) string {
	path := filepath.Join(t.TempDir(), "config")
	writeFile(t, path, fmt.Sprintf(`{current-context: c, clusters: [{name: k, cluster: {server: %q, insecure-skip-tls-verify: true}}],
users: [{name: u, user: {token: %s}}], contexts: [{name: c, context: {cluster: k, user: u, namespace: engines}}]}`, url, goodToken))
	return path
}

// TestPodsTokenIsReadAgain checks the credentials of a pod: its namespace, its CA, and a token that is
// replaced in its file while the source runs.
func TestPodsTokenIsReadAgain(t *testing.T) { // not parallel: it sets the environment
	a := newAPI(t, nil)
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	host, port, _ := strings.Cut(strings.TrimPrefix(a.URL, "https://"), ":")
	t.Setenv("KUBERNETES_SERVICE_HOST", host)
	t.Setenv("KUBERNETES_SERVICE_PORT", port)
	dir := t.TempDir()
	defer func(was string) { serviceAccount = was }(serviceAccount)
	serviceAccount = dir
	writeFile(t, filepath.Join(dir, "ca.crt"), string(a.caPEM()))
	writeFile(t, filepath.Join(dir, "token"), goodToken+"\n")
	writeFile(t, filepath.Join(dir, "namespace"), "engines\n")
	s := start(t, a, func(k *config.Kube) { k.Kubeconfig = "" }, nil)
	s.awaitWatch(t, a)
	writeFile(t, filepath.Join(dir, "token"), badToken)
	a.set(func() { a.token = badToken; a.cutWatches() })
	s.awaitWatch(t, a)
	a.set(func() {
		if a.unknown != 0 {
			t.Errorf("%d calls with the old token; want the token of the file at each call", a.unknown)
		}
	})
	if s.state().Error != "" || strings.Contains(s.logs.String(), "cannot follow") {
		t.Errorf("error %q; want none", s.state().Error)
	}
}

// TestPlugin checks a kubeconfig whose program prints the token: it runs once while its token is
// accepted, gets the environment of the kubeconfig, and runs again after the server refused the token.
func TestPlugin(t *testing.T) {
	t.Parallel()
	a := newAPI(t, nil)
	a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
	dir := t.TempDir()
	plugin := filepath.Join(dir, "plugin")
	writeFile(t, filepath.Join(dir, "token"), goodToken)
	writeFile(t, plugin, `#!/bin/sh
echo run >> "$FOLDER/runs"
case $KUBERNETES_EXEC_INFO in *'"server":"https://127.0.0.1:'*) ;; *) exit 1;; esac
echo "{\"kind\": \"ExecCredential\", \"status\": {\"token\": \"$(cat $FOLDER/$1)\"}}"
`)
	s := start(t, a, func(k *config.Kube) {
		k.Kubeconfig = a.kubeconfig(t, fmt.Sprintf("exec: {apiVersion: client.authentication.k8s.io/v1, command: %q, args: [token], env: [{name: FOLDER, value: %q}], installHint: none, interactiveMode: Never, provideClusterInfo: true}", plugin, dir))
	}, nil)
	runs := func() int {
		text, _ := os.ReadFile(filepath.Join(dir, "runs"))
		return strings.Count(string(text), "run")
	}
	s.awaitWatch(t, a)
	if runs() != 1 {
		t.Errorf("the plugin ran %d times; want once", runs())
	}
	writeFile(t, filepath.Join(dir, "token"), badToken)
	a.set(func() { a.token = badToken; a.cutWatches() })
	s.awaitWatch(t, a)
	if runs() != 2 {
		t.Errorf("the plugin ran %d times; want once more after its token was refused", runs())
	}
	testwait.Until(t, "it is well", func() bool { return s.state().Error == "" })
}

// TestPluginThatFails checks that the error names the program and has nothing that it printed.
func TestPluginThatFails(t *testing.T) {
	t.Parallel()
	for name, does := range map[string]string{"exits": "exit 3", "prints no JSON": "true", "prints no token": "echo {}"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			plugin := filepath.Join(t.TempDir(), "plugin")
			writeFile(t, plugin, "#!/bin/sh\necho "+goodToken+"\n"+does+"\n")
			a := newAPI(t, nil)
			s := start(t, a, func(k *config.Kube) {
				k.Kubeconfig = a.kubeconfig(t, fmt.Sprintf("exec: {apiVersion: client.authentication.k8s.io/v1, command: %q}", plugin))
			}, nil)
			testwait.Until(t, "the error is reported", func() bool {
				return strings.Contains(s.state().Error, "cannot get credentials from "+strconv.Quote(plugin))
			})
		})
	}
}

// TestClientCertificate checks a kubeconfig with a client certificate, as files and as data.
func TestClientCertificate(t *testing.T) {
	t.Parallel()
	cert, key := selfSigned(t)
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "cert"), string(cert))
	writeFile(t, filepath.Join(dir, "key"), string(key))
	in := base64.StdEncoding.EncodeToString
	for name, user := range map[string]string{
		"files": fmt.Sprintf("client-certificate: %q, client-key: %q", filepath.Join(dir, "cert"), filepath.Join(dir, "key")),
		"data":  fmt.Sprintf("client-certificate-data: %s, client-key-data: %s", in(cert), in(key)),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t, func(a *apiServer) {
				pool := x509.NewCertPool()
				pool.AppendCertsFromPEM(cert)
				a.token, a.TLS = "", &tls.Config{ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool}
			})
			a.change(added, newPod("p-0", "prefill", "10.0.0.1"))
			s := start(t, a, func(k *config.Kube) { k.Kubeconfig = a.kubeconfig(t, user) }, nil)
			testwait.Until(t, "it is in", func() bool { return s.String() != "" })
		})
	}
}

// selfSigned returns a certificate for clients and its key, as PEM.
func selfSigned(t *testing.T) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	shape := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "sluice"}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, shape, shape, &private.PublicKey, private)
	if err != nil {
		t.Fatal(err)
	}
	text, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: text})
}

// TestNullFields checks a kubeconfig as eksctl writes it, with fields that are null.
func TestNullFields(t *testing.T) {
	a := newAPI(t, nil)
	path := a.kubeconfig(t, "exec: {apiVersion: client.authentication.k8s.io/v1beta1, command: aws, args: [eks, get-token], env: null, interactiveMode: IfAvailable, provideClusterInfo: false}")
	s, err := New(config.Kube{Selector: "app=x", Kubeconfig: path})
	if err != nil || s.creds.exec.Command != "aws" || s.namespace != "engines" {
		t.Errorf("%+v, %v; want its program", s, err)
	}
}

// TestUnsupportedKubeconfig checks that what the source does not support is an error with the field.
func TestUnsupportedKubeconfig(t *testing.T) {
	a := newAPI(t, nil)
	for user, want := range map[string]string{
		"auth-provider: {name: gcp}": "auth-provider",
		"token: x, as: admin":        "(as)",
		"exec: {apiVersion: client.authentication.k8s.io/v1, command: x, interactiveMode: Always}": "interactiveMode",
		"exec: {command: x}":           "apiVersion",
		"client-key-data: '-'":         "client-key-data",
		"client-certificate-data: '-'": "client-certificate-data",
	} {
		path := a.kubeconfig(t, user)
		if _, err := New(config.Kube{Selector: "app=x", Kubeconfig: path}); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v; want an error with %s and the file", user, err, want)
		}
	}
}
