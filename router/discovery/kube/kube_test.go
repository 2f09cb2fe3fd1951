package kube

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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

// String lists them: id role url.
func (m *members) String() string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var out []string
	for _, id := range slices.Sorted(maps.Keys(m.in)) {
		out = append(out, id+" "+m.in[id].Role.String()+" "+m.in[id].URL)
	}
	return strings.Join(out, ", ")
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("did not happen within 30s: %s", what)
}

func start(t *testing.T, a *apiServer, token string, mod func(*config.Kube)) (*members, func() discovery.State) {
	t.Helper()
	conf := config.Default().Kube
	conf.Selector, conf.Kubeconfig = "app in (prefill,decode)", a.kubeconfig(t, token)
	if mod != nil {
		mod(&conf)
	}
	src, err := New(conf)
	if err != nil {
		t.Fatal(err)
	}
	m := &members{in: map[string]worker.Spec{}}
	run := discovery.NewRunner(m, nil)
	t.Cleanup(func() {
		done := make(chan struct{})
		go func() { defer close(done); run.Close() }()
		select {
		case <-done:
		case <-time.After(10 * time.Second):
			t.Error("it does not end")
		}
	})
	if err := run.Start(src); err != nil {
		t.Fatal(err)
	}
	return m, func() discovery.State { return run.States()[0] }
}

func TestPodsComeAndGo(t *testing.T) {
	for _, noStream := range []bool{false, true} {
		t.Run(map[bool]string{false: "streamed list", true: "list, then watch"}[noStream], func(t *testing.T) {
			a := newAPI(t)
			a.noStream = noStream
			a.change("ADDED", pod("p-0", "prefill", "10.0.0.1"))
			a.change("ADDED", pod("web", "frontend", "10.0.0.9"))
			m, state := start(t, a, "good", nil)
			until(t, "the first is in", func() bool { return m.String() == "p-0 prefill http://10.0.0.1:8000" })
			if lists, _ := a.counts(); (lists > 0) != noStream {
				t.Errorf("%d lists", lists)
			}
			a.change("ADDED", with(pod("d-0", "decode", ""), func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending }))
			a.change("MODIFIED", with(pod("d-0", "decode", "10.0.0.2"), func(p *corev1.Pod) { p.Status.Conditions[0].Status = corev1.ConditionFalse }))
			a.change("ADDED", pod("d-1", "decode", "fd00::5"))
			until(t, "the ready one is in", func() bool {
				return m.String() == "d-1 decode http://[fd00::5]:8000, p-0 prefill http://10.0.0.1:8000"
			})
			a.change("MODIFIED", pod("d-0", "decode", "10.0.0.2"))
			until(t, "the other is ready", func() bool { return strings.HasPrefix(m.String(), "d-0 decode http://10.0.0.2:8000,") })
			a.change("MODIFIED", with(pod("d-0", "decode", "10.0.0.2"), func(p *corev1.Pod) { now := metav1.Now(); p.DeletionTimestamp = &now }))
			a.change("DELETED", pod("d-1", "decode", "fd00::5"))
			until(t, "one ends, one has gone", func() bool { return m.String() == "p-0 prefill http://10.0.0.1:8000" })
			if s := state(); s.Error != "" || s.Workers != 1 {
				t.Errorf("%+v", s)
			}
		})
	}
}

// A server that has forgotten where the watch stood is listed anew: nothing of
// what happened in between is missed.
func TestGoneIsListedAnew(t *testing.T) {
	a := newAPI(t)
	a.noStream = true
	a.change("ADDED", pod("p-0", "prefill", "10.0.0.1"))
	m, _ := start(t, a, "good", nil)
	until(t, "it is in", func() bool { return m.String() == "p-0 prefill http://10.0.0.1:8000" })
	a.set(func() { a.denied = 503 }) // nothing is seen of what comes now
	a.set(func() { close(a.cut); a.cut = make(chan struct{}) })
	a.change("DELETED", pod("p-0", "prefill", "10.0.0.1"))
	a.change("ADDED", pod("p-1", "prefill", "10.0.0.2"))
	a.forget()
	a.set(func() { a.denied = 0 })
	until(t, "the new state is there", func() bool { return m.String() == "p-1 prefill http://10.0.0.2:8000" })
	if lists, _ := a.counts(); lists < 2 {
		t.Errorf("%d lists; want one more after 410", lists)
	}
}

func TestRefusedCredentials(t *testing.T) {
	a := newAPI(t)
	a.change("ADDED", pod("p-0", "prefill", "10.0.0.1"))
	m, state := start(t, a, "bad", nil)
	until(t, "the failure is shown", func() bool { return strings.Contains(state().Error, "nauthorized") })
	if m.String() != "" {
		t.Error(m)
	}
}

// A cluster that goes away takes nobody out, and what is wrong is shown until it
// is well again.
func TestForbiddenForAWhile(t *testing.T) {
	a := newAPI(t)
	a.change("ADDED", pod("p-0", "prefill", "10.0.0.1"))
	m, state := start(t, a, "good", nil)
	until(t, "it is in", func() bool { return m.String() != "" })
	a.set(func() { a.denied = 403; close(a.cut); a.cut = make(chan struct{}) })
	until(t, "the failure is shown", func() bool { return strings.Contains(state().Error, "cannot list resource") })
	if m.String() == "" {
		t.Error("it is out though nobody said so")
	}
	a.set(func() { a.denied = 0 })
	until(t, "it is well again", func() bool { return state().Error == "" })
}

func TestSlowServer(t *testing.T) {
	a := newAPI(t)
	a.slow = 300 * time.Millisecond
	a.change("ADDED", pod("p-0", "prefill", "10.0.0.1"))
	m, _ := start(t, a, "good", nil)
	until(t, "it is in after all", func() bool { return m.String() != "" })
}

func TestNamesPortsAndModels(t *testing.T) {
	a := newAPI(t)
	a.change("ADDED", with(pod("p-0", "p", "10.0.0.1"), func(p *corev1.Pod) {
		p.Labels = map[string]string{"app": "prefill", "tier": "first", "model": "tiny"}
	}))
	a.change("ADDED", with(pod("x", "decode", "10.0.0.2"), func(p *corev1.Pod) {
		p.Namespace, p.Annotations = "other", map[string]string{"model": "org/huge"}
	}))
	a.change("ADDED", with(pod("bad", "decode", "10.0.0.3"), func(p *corev1.Pod) { p.Spec.Containers[0].Ports = nil }))
	m, state := start(t, a, "good", func(k *config.Kube) {
		k.Namespace, k.Port, k.RoleLabel, k.Prefill, k.ModelLabel = "*", "http", "tier", []string{"first"}, "model"
		k.Worker = &config.Worker{Engine: "vllm", Ranks: []uint16{0, 1}, KVEvents: []string{"tcp://*:5557"}}
	})
	until(t, "both are in", func() bool {
		return m.String() == "engines.p-0 prefill http://10.0.0.1:9000, other.x aggregated http://10.0.0.2:9000"
	})
	m.mu.Lock()
	p, x := m.in["engines.p-0"], m.in["other.x"]
	m.mu.Unlock()
	if p.Models[0] != "tiny" || x.Models[0] != "org/huge" || p.Engine != "vllm" || len(p.Ranks) != 2 || p.KVEvents[0] != "tcp://*:5557" || p.Source != "kube" {
		t.Errorf("%+v\n%+v", p, x)
	}
	until(t, "the pod without the port is named", func() bool {
		return strings.Contains(state().Error, "engines/bad") && strings.Contains(state().Error, `"http"`)
	})
}

func TestNewTellsWhatIsWrong(t *testing.T) {
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
