package kube

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"testing"
)

const (
	added    = "ADDED"
	modified = "MODIFIED"
	deleted  = "DELETED"
)

// testPod is a pod of the fake API server. It writes its JSON itself, so that a mistake in the source's
// own types does not cancel out.
type testPod struct {
	name, namespace, ip, phase string
	version                    int
	ready, deleting, portless  bool
	labels, annotations        map[string]string
}

// newPod returns a ready pod whose container port "http" is 9000.
func newPod(name, app, ip string) testPod {
	return testPod{name: name, namespace: "engines", ip: ip, phase: "Running", ready: true, labels: map[string]string{"app": app}}
}

func with(p testPod, f func(*testPod)) testPod { f(&p); return p }

func (p testPod) key() string { return p.namespace + "/" + p.name }

func (p testPod) json() any {
	type m = map[string]any
	meta := m{"name": p.name, "namespace": p.namespace, "uid": "u-" + p.name, "resourceVersion": strconv.Itoa(p.version), "labels": p.labels, "annotations": p.annotations}
	if p.deleting {
		meta["deletionTimestamp"] = "2026-01-02T03:04:05Z"
	}
	ready := map[bool]string{true: "True", false: "False"}[p.ready]
	engine := m{"name": "engine", "image": "vllm/vllm-openai"}
	if !p.portless {
		engine["ports"] = []m{{"name": "metrics", "containerPort": 9100, "protocol": "TCP"}, {"name": "http", "containerPort": 9000, "protocol": "TCP"}}
	}
	return m{"kind": "Pod", "apiVersion": "v1", "metadata": meta,
		"spec":   m{"nodeName": "n", "containers": []m{{"name": "log"}, engine}},
		"status": m{"phase": p.phase, "podIP": p.ip, "conditions": []m{{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready}}}}
}

// apiServer implements the part of the Kubernetes API that a watch of pods needs, with TLS: list in
// pages, watch with bookmarks, 410 Gone for discarded resource versions, bearer tokens, and one label
// selector. It replaces a cluster, which is not available in a test.
type apiServer struct {
	*httptest.Server
	mu       sync.Mutex
	version  int
	pods     map[string]testPod
	log      []change // since oldest
	oldest   int      // versions up to this one are discarded
	changed  chan struct{}
	token    string        // the accepted token; "": none is checked
	denied   int           // status of every response; 0: calls are served
	unknown  int           // number of calls without the accepted token
	page     int           // pods of one page of a list; 0: all
	goneHead bool          // sends 410 as a status instead of as an event of the watch
	endAt    bool          // ends each watch at once
	hold     chan struct{} // calls wait until it is closed; nil: no wait
	cut      chan struct{} // watches end when it is closed
	calls    []call
	open     int // number of open watches
	reported int // latest version that a watch has sent
}

// call is one authorized call.
type call struct {
	kind     string // list (its first page), page (another), watch, gone (a watch answered 410)
	version  string // requested resourceVersion
	selector string
	proto    string
}

type change struct {
	kind string
	pod  testPod
}

const (
	goodToken = "good-token-5d41402abc4b"
	badToken  = "bad-token-7d793037a076"
)

func newAPI(t *testing.T, mod func(*apiServer)) *apiServer {
	a := &apiServer{version: 100, token: goodToken, pods: map[string]testPod{}, changed: make(chan struct{}), cut: make(chan struct{})}
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(a.serve))
	a.EnableHTTP2 = true
	if mod != nil {
		mod(a)
	}
	a.StartTLS()
	t.Cleanup(func() { a.CloseClientConnections(); a.Close() })
	return a
}

func (a *apiServer) caPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw})
}

// kubeconfig writes a kubeconfig for the server and returns its path. user has the credentials, as
// "token: …".
func (a *apiServer) kubeconfig(t *testing.T, user string) string {
	t.Helper()
	dir := t.TempDir()
	writeFile(t, filepath.Join(dir, "ca.pem"), string(a.caPEM()))
	path := filepath.Join(dir, "config")
	writeFile(t, path, fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: k, cluster: {server: %q, certificate-authority: ca.pem}}],
users: [{name: u, user: {%s}}],
contexts: [{name: c, context: {cluster: k, user: u, namespace: engines}}]}`, a.URL, user))
	return path
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o700); err != nil {
		t.Fatal(err)
	}
}

func (a *apiServer) change(kind string, pod testPod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	pod.version = a.version
	if kind == deleted {
		delete(a.pods, pod.key())
	} else {
		a.pods[pod.key()] = pod
	}
	a.log = append(a.log, change{kind, pod})
	close(a.changed)
	a.changed = make(chan struct{})
}

// forget discards the history, like a server that compacts it.
func (a *apiServer) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.oldest, a.log = a.version, nil
}

// stop blocks new calls until back is called. It ends what is open: with byForce by closing all
// connections, otherwise by ending the watches properly.
func (a *apiServer) stop(byForce bool) (back func()) {
	held := make(chan struct{})
	a.set(func() { a.hold = held })
	if byForce {
		a.CloseClientConnections()
	} else {
		a.set(a.cutWatches)
	}
	return func() { a.set(func() { a.hold = nil }); close(held) }
}

// cutWatches ends the open watches. The caller holds mu.
func (a *apiServer) cutWatches() {
	close(a.cut)
	a.cut = make(chan struct{})
}

func (a *apiServer) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// count returns the number of authorized calls of a kind.
func (a *apiServer) count(kind string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.calls {
		if c.kind == kind {
			n++
		}
	}
	return n
}

func failure(code int, message string) any {
	return map[string]any{"kind": "Status", "apiVersion": "v1", "metadata": map[string]any{}, "status": "Failure", "code": code, "message": message}
}

func fail(w http.ResponseWriter, code int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(failure(code, message))
}

func (a *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	denied, hold, token := a.denied, a.hold, a.token
	a.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return
		}
	}
	namespace := ""
	switch {
	case r.URL.Path == "/api/v1/pods":
	case r.URL.Path == "/api/v1/namespaces/engines/pods":
		namespace = "engines"
	default:
		fail(w, 404, r.URL.Path)
		return
	}
	q := r.URL.Query()
	switch {
	case token != "" && r.Header.Get("Authorization") != "Bearer "+token:
		a.set(func() { a.unknown++ })
		fail(w, 401, "Unauthorized")
		return
	case denied != 0:
		fail(w, denied, `pods is forbidden: User "system:serviceaccount:engines:sluice" cannot list resource "pods"`)
		return
	case q.Get("labelSelector") != "app in (prefill,decode)":
		fail(w, 400, "unable to parse requirement")
		return
	}
	match := func(p testPod) bool {
		return (namespace == "" || p.namespace == namespace) && (p.labels["app"] == "prefill" || p.labels["app"] == "decode")
	}
	if q.Get("watch") == "" {
		a.list(w, r, match)
		return
	}
	a.watch(w, r, match)
}

// admit records a call. The caller holds mu.
func (a *apiServer) admit(kind string, r *http.Request) {
	q := r.URL.Query()
	a.calls = append(a.calls, call{kind, q.Get("resourceVersion"), q.Get("labelSelector"), r.Proto})
}

// list answers one page, from the number that the client continues with.
func (a *apiServer) list(w http.ResponseWriter, r *http.Request, match func(testPod) bool) {
	from, _ := strconv.Atoi(r.URL.Query().Get("continue"))
	a.mu.Lock()
	a.admit(map[bool]string{true: "list", false: "page"}[from == 0], r)
	items := []any{}
	for _, key := range slices.Sorted(maps.Keys(a.pods)) {
		if match(a.pods[key]) {
			items = append(items, a.pods[key].json())
		}
	}
	meta := map[string]any{"resourceVersion": strconv.Itoa(a.version)}
	if items = items[min(from, len(items)):]; a.page > 0 && len(items) > a.page {
		items, meta["continue"] = items[:a.page], strconv.Itoa(from+a.page)
	}
	a.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{"kind": "PodList", "apiVersion": "v1", "metadata": meta, "items": items})
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, match func(testPod) bool) {
	q := r.URL.Query()
	at, _ := strconv.Atoi(q.Get("resourceVersion"))
	a.mu.Lock()
	gone, goneHead, end, cut := at < a.oldest, a.goneHead, a.endAt, a.cut
	a.admit(map[bool]string{true: "gone", false: "watch"}[gone], r)
	a.mu.Unlock()
	if gone && goneHead {
		fail(w, 410, "too old resource version")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	send := func(kind string, object any) {
		json.NewEncoder(w).Encode(map[string]any{"type": kind, "object": object})
		w.(http.Flusher).Flush()
	}
	if gone {
		send("ERROR", failure(410, "too old resource version"))
		return
	}
	w.(http.Flusher).Flush()
	if end {
		return
	}
	a.set(func() { a.open++ })
	defer a.set(func() { a.open-- })
	for {
		select {
		case <-cut: // before pending changes are sent
			return
		default:
		}
		a.mu.Lock()
		changed := a.changed
		var news []change
		for _, e := range a.log {
			if e.pod.version > at && match(e.pod) {
				news = append(news, e)
			}
		}
		at = a.version
		a.mu.Unlock()
		for _, e := range news {
			send(e.kind, e.pod.json())
		}
		if q.Get("allowWatchBookmarks") == "true" {
			send("BOOKMARK", map[string]any{"kind": "Pod", "apiVersion": "v1", "metadata": map[string]any{"resourceVersion": strconv.Itoa(at), "creationTimestamp": nil},
				"spec": map[string]any{"containers": nil}, "status": map[string]any{}})
		}
		a.set(func() { a.reported = max(a.reported, at) })
		select {
		case <-changed:
		case <-cut:
			return
		case <-r.Context().Done():
			return
		}
	}
}
