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
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	restwatch "k8s.io/client-go/rest/watch"
)

// apiServer implements the part of the Kubernetes API that a watch of pods needs, over real HTTP/2
// with TLS: list, watch with bookmarks, streamed lists, 410 Gone for discarded resource versions,
// bearer tokens, label selectors, protobuf and JSON. It replaces a cluster, which is not available
// in a test.
type apiServer struct {
	*httptest.Server
	mu       sync.Mutex
	version  int
	pods     map[string]*corev1.Pod
	log      []change // since oldest
	oldest   int      // versions up to this one are discarded
	changed  chan struct{}
	token    string        // the accepted token
	denied   int           // status of every response; 0: calls are served
	unknown  int           // number of calls without the accepted token
	json     bool          // always responds with JSON, as behind a translating proxy
	noStream bool          // 422 for streamed lists, as from older servers
	goneHead bool          // sends 410 as a status instead of as an event of the watch
	hold     chan struct{} // calls wait until it is closed; nil: no wait
	cut      chan struct{} // watches end when it is closed
	calls    []call
	open     int // number of open watches
}

// call is one authorized call.
type call struct {
	kind     string // list, stream (a list as a watch), watch, gone (a watch answered 410)
	version  string // requested resourceVersion
	selector string
	proto    string
	media    string // media type of the response
}

type change struct {
	version int
	kind    watch.EventType
	pod     *corev1.Pod
}

const (
	goodToken = "good-token-5d41402abc4b"
	badToken  = "bad-token-7d793037a076"
)

func newAPI(t *testing.T) *apiServer {
	a := &apiServer{version: 100, token: goodToken, pods: map[string]*corev1.Pod{}, changed: make(chan struct{}), cut: make(chan struct{})}
	a.Server = httptest.NewUnstartedServer(http.HandlerFunc(a.serve))
	a.EnableHTTP2 = true
	a.StartTLS()
	t.Cleanup(func() { a.CloseClientConnections(); a.Close() })
	return a
}

// kubeconfig writes a kubeconfig for the server and returns its path. user has the credentials, as
// "token: …".
func (a *apiServer) kubeconfig(t *testing.T, user string) string {
	t.Helper()
	dir := t.TempDir()
	ca := filepath.Join(dir, "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: a.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "config")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: k, cluster: {server: %q, certificate-authority: %q}}],
users: [{name: u, user: {%s}}],
contexts: [{name: c, context: {cluster: k, user: u, namespace: engines}}]}`, a.URL, ca, user)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (a *apiServer) change(kind watch.EventType, pod *corev1.Pod) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	pod = pod.DeepCopy()
	pod.ResourceVersion = strconv.Itoa(a.version)
	key := pod.Namespace + "/" + pod.Name
	if kind == watch.Deleted {
		delete(a.pods, key)
	} else {
		a.pods[key] = pod
	}
	a.log = append(a.log, change{a.version, kind, pod})
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

func fail(w http.ResponseWriter, code int, reason metav1.StatusReason, msg string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	json.NewEncoder(w).Encode(&metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: "Failure", Code: int32(code), Reason: reason, Message: msg})
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
		fail(w, 404, metav1.StatusReasonNotFound, r.URL.Path)
		return
	}
	switch {
	case r.Header.Get("Authorization") != "Bearer "+token:
		a.set(func() { a.unknown++ })
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
		a.list(w, r, match)
		return
	}
	a.watch(w, r, match)
}

// media returns the media type of the response: protobuf if the client accepts it, as real API
// servers choose.
func (a *apiServer) media(r *http.Request) runtime.SerializerInfo {
	kind := runtime.ContentTypeJSON
	if !a.json && strings.Contains(r.Header.Get("Accept"), runtime.ContentTypeProtobuf) {
		kind = runtime.ContentTypeProtobuf
	}
	info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), kind)
	return info
}

// admit records a call. The caller holds mu.
func (a *apiServer) admit(kind string, r *http.Request, media string) {
	q := r.URL.Query()
	a.calls = append(a.calls, call{kind, q.Get("resourceVersion"), q.Get("labelSelector"), r.Proto, media})
}

func encoder(s runtime.Serializer) runtime.Encoder {
	return scheme.Codecs.WithoutConversion().EncoderForVersion(s, corev1.SchemeGroupVersion)
}

func (a *apiServer) list(w http.ResponseWriter, r *http.Request, match func(*corev1.Pod) bool) {
	a.mu.Lock()
	info := a.media(r)
	a.admit("list", r, info.MediaType)
	list := corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(a.version)}}
	for _, p := range a.pods {
		if match(p) {
			list.Items = append(list.Items, *p.DeepCopy())
		}
	}
	a.mu.Unlock()
	w.Header().Set("Content-Type", info.MediaType)
	_ = encoder(info.Serializer).Encode(&list, w)
}

func (a *apiServer) watch(w http.ResponseWriter, r *http.Request, match func(*corev1.Pod) bool) {
	q := r.URL.Query()
	at, _ := strconv.Atoi(q.Get("resourceVersion"))
	streamed := q.Get("sendInitialEvents") == "true"
	a.mu.Lock()
	gone, goneHead, refused, cut, info := !streamed && at < a.oldest, a.goneHead, streamed && a.noStream, a.cut, a.media(r)
	switch {
	case refused:
	case gone:
		a.admit("gone", r, info.MediaType)
	case streamed:
		a.admit("stream", r, info.MediaType)
	default:
		a.admit("watch", r, info.MediaType)
	}
	a.mu.Unlock()
	switch {
	case refused:
		fail(w, 422, metav1.StatusReasonInvalid, "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
		return
	case gone && goneHead:
		fail(w, 410, metav1.StatusReasonExpired, "too old resource version")
		return
	}
	stream := info.StreamSerializer
	kind := info.MediaType
	if kind != runtime.ContentTypeJSON {
		kind += ";stream=watch"
	}
	w.Header().Set("Content-Type", kind)
	out := restwatch.NewEncoder(streaming.NewEncoder(stream.Framer.NewFrameWriter(w), encoder(stream.Serializer)), encoder(info.Serializer))
	send := func(kind watch.EventType, obj runtime.Object) {
		_ = out.Encode(&watch.Event{Type: kind, Object: obj})
		w.(http.Flusher).Flush()
	}
	bookmark := func(version int, end bool) {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: strconv.Itoa(version)}}
		if end {
			p.Annotations = map[string]string{metav1.InitialEventsAnnotationKey: "true"}
		}
		send(watch.Bookmark, p)
	}
	if gone {
		send(watch.Error, &metav1.Status{Status: "Failure", Code: 410, Reason: metav1.StatusReasonExpired, Message: "too old resource version"})
		return
	}
	if streamed {
		a.mu.Lock()
		var now []*corev1.Pod
		for _, p := range a.pods {
			if match(p) {
				now = append(now, p.DeepCopy())
			}
		}
		at = a.version
		a.mu.Unlock()
		for _, p := range now {
			send(watch.Added, p)
		}
		bookmark(at, true)
	}
	w.(http.Flusher).Flush()
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
			if e.version > at && match(e.pod) {
				news = append(news, change{e.version, e.kind, e.pod.DeepCopy()})
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
