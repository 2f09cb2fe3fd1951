package kube

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// apiServer speaks the part of the Kubernetes API that a watch of pods needs,
// over real HTTP with TLS: list, watch with bookmarks, streamed lists, resource
// versions with 410 Gone for those forgotten, bearer tokens, label selectors. It
// stands in for a cluster, which cannot be had in a test.
type apiServer struct {
	*httptest.Server
	mu       sync.Mutex
	version  int
	pods     map[string]*corev1.Pod
	log      []event // since oldest
	oldest   int     // versions up to this are forgotten
	changed  chan struct{}
	denied   int  // status for every call
	noStream bool // as servers before streamed lists: 422
	slow     time.Duration
	lists    int
	watches  int
	cut      chan struct{} // closed: watches end
}

type event struct {
	version int
	kind    string
	pod     *corev1.Pod
}

func newAPI(t *testing.T) *apiServer {
	a := &apiServer{version: 100, pods: map[string]*corev1.Pod{}, changed: make(chan struct{}), cut: make(chan struct{})}
	a.Server = httptest.NewTLSServer(http.HandlerFunc(a.serve))
	t.Cleanup(func() { a.CloseClientConnections(); a.Close() })
	return a
}

// kubeconfig writes one for the server.
func (a *apiServer) kubeconfig(t *testing.T, token string) string {
	t.Helper()
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: k, cluster: {server: %q, certificate-authority: %q}}],
users: [{name: u, user: {token: %s}}],
contexts: [{name: c, context: {cluster: k, user: u, namespace: engines}}]}`, a.URL, ca, token)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (a *apiServer) change(kind string, pod *corev1.Pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	pod = pod.DeepCopy()
	pod.ResourceVersion = strconv.Itoa(a.version)
	key := pod.Namespace + "/" + pod.Name
	if kind == "DELETED" {
		delete(a.pods, key)
	} else {
		a.pods[key] = pod
	}
	a.log = append(a.log, event{a.version, kind, pod})
	close(a.changed)
	a.changed = make(chan struct{})
}

// forget drops the history, as a server that compacts, and ends all watches.
func (a *apiServer) forget() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	a.oldest, a.log = a.version, nil
	close(a.cut)
	a.cut = make(chan struct{})
}

func (a *apiServer) set(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

func (a *apiServer) counts() (lists, watches int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lists, a.watches
}

func fail(w http.ResponseWriter, code int, reason metav1.StatusReason, msg string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(&metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason, Message: msg})
}

func (a *apiServer) serve(w http.ResponseWriter, r *http.Request) {
	a.mu.Lock()
	denied, slow := a.denied, a.slow
	a.mu.Unlock()
	select {
	case <-time.After(slow):
	case <-r.Context().Done():
		return
	}
	namespace := ""
	switch {
	case r.URL.Path == "/api/v1/pods":
	case r.URL.Path == "/api/v1/namespaces/engines/pods":
		namespace = "engines"
	default:
		fail(w, 404, metav1.StatusReasonNotFound, r.URL.Path)
		return
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer good":
		fail(w, 401, metav1.StatusReasonUnauthorized, "Unauthorized")
		return
	case denied != 0:
		fail(w, denied, metav1.StatusReasonForbidden, `pods is forbidden: User "system:serviceaccount:engines:sluice" cannot list resource "pods"`)
		return
	}
	q := r.URL.Query()
	selector, err := labels.Parse(q.Get("labelSelector"))
	if err != nil {
		fail(w, 400, metav1.StatusReasonBadRequest, err.Error())
		return
	}
	match := func(p *corev1.Pod) bool {
		return (namespace == "" || p.Namespace == namespace) && selector.Matches(labels.Set(p.Labels))
	}
	if q.Get("watch") == "" {
		a.list(w, match)
		return
	}
	a.watch(w, r, match)
}

func (a *apiServer) list(w http.ResponseWriter, match func(*corev1.Pod) bool) {
	a.mu.Lock()
	a.lists++
	list := corev1.PodList{TypeMeta: metav1.TypeMeta{Kind: "PodList", APIVersion: "v1"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(a.version)}}
	for _, p := range a.pods {
		if match(p) {
			list.Items = append(list.Items, *p)
		}
	}
	a.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(&list)
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, match func(*corev1.Pod) bool) {
	q := r.URL.Query()
	a.mu.Lock()
	at, _ := strconv.Atoi(q.Get("resourceVersion"))
	streamed := q.Get("sendInitialEvents") == "true"
	oldest, noStream, cut := a.oldest, a.noStream, a.cut
	if !streamed || !noStream {
		a.watches++
	}
	a.mu.Unlock()
	if streamed && noStream {
		fail(w, 422, metav1.StatusReasonInvalid, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	out := json.NewEncoder(w)
	send := func(kind string, obj any) {
		out.Encode(map[string]any{"type": kind, "object": obj})
		w.(http.Flusher).Flush()
	}
	bookmark := func(version int, end bool) {
		p := &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}, ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version)}}
		if end {
			p.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		}
		send("BOOKMARK", p)
	}
	if !streamed && at < oldest {
		send("ERROR", &metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: 410, Reason: metav1.StatusReasonExpired, Message: "too old resource version"})
		return
	}
	if streamed {
		a.mu.Lock()
		var now []*corev1.Pod
		for _, p := range a.pods {
			if match(p) {
				now = append(now, p)
			}
		}
		at = a.version
		a.mu.Unlock()
		for _, p := range now {
			send("ADDED", p)
		}
		bookmark(at, true)
	}
	w.(http.Flusher).Flush()
	for {
		a.mu.Lock()
		changed := a.changed
		var news []event
		for _, e := range a.log {
			if e.version > at && match(e.pod) {
				news = append(news, e)
			}
		}
		at = a.version
		a.mu.Unlock()
		for _, e := range news {
			send(e.kind, e.pod)
		}
		bookmark(at, false)
		select {
		case <-changed:
		case <-cut:
			return
		case <-r.Context().Done():
			return
		}
	}
}
