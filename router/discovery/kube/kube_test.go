package kube

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

func pod(name, app, ip string) *corev1.Pod {
	return &corev1.Pod{
		TypeMeta:   metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "engines", Labels: map[string]string{"app": app}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "engine", Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 9000}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

func with(p *corev1.Pod, f func(*corev1.Pod)) *corev1.Pod { f(p); return p }

type members struct {
	mu sync.Mutex
	in map[string]worker.Spec
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
	conf.Selector, conf.Kubeconfig = "app in (prefill,decode)", a.kubeconfig(t, "token: "+goodToken)
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
	{"streamed list, protobuf", func(*apiServer) {}},
	{"streamed list, JSON", func(a *apiServer) { a.json = true }},
	{"list, then watch, protobuf", func(a *apiServer) { a.noStream = true }},
	{"list, then watch, JSON", func(a *apiServer) { a.noStream, a.json = true, true }},
}

func forEachServer(t *testing.T, test func(*testing.T, *apiServer)) {
	for _, s := range servers {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t)
			s.mod(a)
			test(t, a)
		})
	}
}

func TestPodsComeAndGo(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
		a.change(watch.Added, pod("web", "frontend", "10.0.0.9"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "the first is in", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		a.change(watch.Added, with(pod("d-0", "decode", ""), func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }))
		a.change(watch.Modified, with(pod("d-0", "decode", "10.0.0.2"), func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }))
		a.change(watch.Added, pod("d-1", "decode", "fd00::5"))
		testwait.Until(t, "the ready one is in", func() bool {
			return s.String() == "d-1 decode http://[fd00::5]:8000, p-0 prefill http://10.0.0.1:8000"
		})
		a.change(watch.Modified, pod("d-0", "decode", "10.0.0.2"))
		testwait.Until(t, "the other is ready", func() bool { return strings.HasPrefix(s.String(), "d-0 decode http://10.0.0.2:8000,") })
		a.change(watch.Modified, with(pod("d-0", "decode", "10.0.0.2"), func(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }))
		a.change(watch.Deleted, pod("d-1", "decode", "fd00::5"))
		testwait.Until(t, "one ends, one has gone", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		if st := s.state(); st.Error != "" || st.Workers != 1 {
			t.Errorf("%+v", st)
		}
		listed := map[bool]string{false: "stream", true: "list"}[a.noStream]
		if a.count(listed) != 1 || a.count("stream")+a.count("list") != 1 {
			t.Errorf("%+v; want one %s", a.calls, listed)
		}
		media := map[bool]string{false: "application/vnd.kubernetes.protobuf", true: "application/json"}[a.json]
		a.set(func() {
			for _, c := range a.calls {
				if c.selector != "app in (prefill,decode)" || c.proto != "HTTP/2.0" || c.media != media {
					t.Errorf("%+v; want the selector, HTTP/2 and %s", c, media)
				}
			}
		})
	})
}

// awaitWatch waits until a watch has delivered an event. The reflector treats a watch that ends
// without one as that of a server which cannot watch, and lists again.
func (s *runningSource) awaitWatch(t *testing.T, a *apiServer) {
	t.Helper()
	testwait.Until(t, "there is a watch", func() (open bool) { a.set(func() { open = a.open > 0 }); return open })
	before := s.String()
	a.change(watch.Added, pod("a-moment", "decode", "10.9.9.9"))
	testwait.Until(t, "it brings one", func() bool { return s.String() != before })
	a.change(watch.Deleted, pod("a-moment", "decode", "10.9.9.9"))
	testwait.Until(t, "and takes it", func() bool { return s.String() == before })
}

// TestDroppedWatchResumes checks that a new watch resumes at the old one's position after a lost
// connection: it delivers the changes in between, without a new list.
func TestDroppedWatchResumes(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "it is in", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		lists := a.count("list") + a.count("stream")
		for i, byForce := range []bool{true, false} {
			s.awaitWatch(t, a)
			var stood int
			a.set(func() { stood = a.version })
			watches := a.count("watch")
			back := a.stop(byForce)
			a.change(watch.Deleted, pod(fmt.Sprint("p-", i), "prefill", fmt.Sprint("10.0.0.", 1+i)))
			a.change(watch.Added, pod(fmt.Sprint("p-", i+1), "prefill", fmt.Sprint("10.0.0.", 2+i)))
			back()
			want := fmt.Sprintf("p-%d prefill http://10.0.0.%d:8000", i+1, i+2)
			testwait.Until(t, "what happened meanwhile is there: "+want, func() bool { return s.String() == want })
			if n := a.count("list") + a.count("stream"); n != lists {
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
// position, and misses no change in between.
func TestGoneRelists(t *testing.T) {
	t.Parallel()
	forEachServer(t, func(t *testing.T, a *apiServer) {
		a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
		s := start(t, a, nil, nil)
		testwait.Until(t, "it is in", func() bool { return s.String() == "p-0 prefill http://10.0.0.1:8000" })
		for i, head := range []bool{false, true} {
			s.awaitWatch(t, a)
			lists, gone := a.count("list")+a.count("stream"), a.count("gone")
			a.set(func() { a.goneHead = head })
			back := a.stop(false)
			a.change(watch.Deleted, pod(fmt.Sprint("p-", i), "prefill", "10.0.0.1"))
			a.change(watch.Added, pod(fmt.Sprint("p-", i+1), "prefill", fmt.Sprint("10.0.0.", i+2)))
			a.forget()
			back()
			want := fmt.Sprintf("p-%d prefill http://10.0.0.%d:8000", i+1, i+2)
			testwait.Until(t, "the new state is there: "+want, func() bool { return s.String() == want })
			if a.count("gone") == gone || a.count("list")+a.count("stream") == lists {
				t.Errorf("410 as a status %v: %+v; want a watch that was refused, and a list after it", head, a.calls)
			}
			testwait.Until(t, "it is well", func() bool { return s.state().Error == "" })
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
	a := newAPI(t)
	a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
	var path string
	s := start(t, a, func(k *config.Kube) { path = a.kubeconfig(t, "token: "+badToken); k.Kubeconfig = path }, nil)
	testwait.Until(t, "the failure is shown", func() bool { return s.state().Error != "" })
	for _, want := range []string{"401", "nauthorized", a.URL, path, "app in (prefill,decode)", "namespace engines", "want a token or certificate"} {
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
	a := newAPI(t)
	a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
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
	for _, s := range servers[1:3] {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			a := newAPI(t)
			s.mod(a)
			a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
			back := a.stop(false)
			s := start(t, a, nil, func(s *Source) { s.responseTimeout = time.Second })
			testwait.Until(t, "it is told", func() bool { return strings.Contains(s.state().Error, "no answer for 1s") })
			back()
			testwait.Until(t, "it is in after all, and well", func() bool { return s.String() != "" && s.state().Error == "" })
		})
	}
}

// TestServerIsDown checks that State has an error while nothing listens at the server's address.
func TestServerIsDown(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.change(watch.Added, pod("p-0", "prefill", "10.0.0.1"))
	s := start(t, a, nil, nil)
	testwait.Until(t, "it is in", func() bool { return s.String() != "" })
	a.Listener.Close()
	a.CloseClientConnections()
	testwait.Until(t, "it is told", func() bool { return strings.Contains(s.state().Error, a.URL) })
	if s.String() == "" {
		t.Error("it is out though nobody said so")
	}
}

func TestNamesPortsAndModels(t *testing.T) {
	t.Parallel()
	a := newAPI(t)
	a.change(watch.Added, with(pod("p-0", "p", "10.0.0.1"), func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "prefill", "tier": "first", "model": "tiny"}
	}))
	a.change(watch.Added, with(pod("x", "decode", "10.0.0.2"), func(p *corev1.Pod) {
		p.Namespace, p.Annotations = "other", map[string]string{"model": "org/huge"}
	}))
	portless := func(name string) *corev1.Pod {
		return with(pod(name, "decode", "10.0.0.3"), func(p *corev1.Pod) { p.Spec.Containers[0].Ports = nil })
	}
	a.change(watch.Added, portless("bad"))
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
	a.change(watch.Added, portless("worse"))
	testwait.Until(t, "the other is counted", func() bool { return strings.Contains(s.state().Error, "1 other") })

	// The error stays while other pods change, and it is not logged again.
	told := strings.Count(s.logs.String(), "engines/bad")
	a.change(watch.Deleted, with(pod("x", "decode", "10.0.0.2"), func(p *corev1.Pod) { p.Namespace = "other" }))
	testwait.Until(t, "one is out", func() bool { return s.String() == "engines.p-0 prefill http://10.0.0.1:9000" })
	if n := strings.Count(s.logs.String(), "engines/bad"); n != told || !strings.Contains(s.state().Error, "engines/bad") {
		t.Errorf("logged %d times, then %d; now %+v", told, n, s.state())
	}
	a.change(watch.Deleted, portless("bad"))
	a.change(watch.Deleted, portless("worse"))
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
		"https://u:secret@[::":                "",
	} {
		if got, ok := shown(host); got != want || ok != (want != "") {
			t.Errorf("%s is shown as %q; want %q", host, got, want)
		}
	}
}

// TestClientIsSilent checks that client-go does not log, although it can log calls with their
// headers.
func TestClientIsSilent(t *testing.T) {
	start(t, newAPI(t), nil, nil)
	if klog.Background().Enabled() || klog.Background().V(9).Enabled() {
		t.Error("client-go has a log of its own")
	}
}
