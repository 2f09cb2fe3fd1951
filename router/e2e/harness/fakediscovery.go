package harness

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"
)

// FakeDNS is a DNS server that answers SRV queries over UDP. The tests of package dns cover the
// responses that a real server may send.
type FakeDNS struct {
	Addr    string
	mu      sync.Mutex
	targets map[string]netip.AddrPort
}

// StartFakeDNS starts a server without targets on a free UDP port. It stops when the test ends.
func StartFakeDNS(t *testing.T) *FakeDNS {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	n := &FakeDNS{Addr: conn.LocalAddr().String(), targets: map[string]netip.AddrPort{}}
	go func() {
		buf := make([]byte, 4096)
		for {
			size, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if answer := n.answer(buf[:size]); answer != nil {
				conn.WriteTo(answer, from)
			}
		}
	}()
	return n
}

// SetTarget sets the engine URL that a name resolves to; "" removes the target.
func (n *FakeDNS) SetTarget(name, url string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.targets[name], _ = netip.ParseAddrPort(strings.TrimPrefix(url, "http://"))
}

func (n *FakeDNS) answer(packet []byte) []byte {
	var q dnsmessage.Message
	if q.Unpack(packet) != nil || len(q.Questions) != 1 {
		return nil
	}
	name := q.Questions[0].Name
	head := func(name dnsmessage.Name) dnsmessage.ResourceHeader {
		return dnsmessage.ResourceHeader{Name: name, Class: dnsmessage.ClassINET}
	}
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: q.ID, Response: true}, Questions: q.Questions}
	n.mu.Lock()
	at := n.targets[name.String()]
	n.mu.Unlock()
	if at.IsValid() && q.Questions[0].Type == dnsmessage.TypeSRV {
		host := dnsmessage.MustNewName("host.engines.")
		m.Answers = []dnsmessage.Resource{{Header: head(name), Body: &dnsmessage.SRVResource{Target: host, Port: at.Port()}}}
		m.Additionals = []dnsmessage.Resource{{Header: head(host), Body: &dnsmessage.AResource{A: at.Addr().As4()}}}
	}
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	return b
}

// FakeKubeAPI is a Kubernetes API server that lists pods and reports deletions to one watch.
// The tests of package kube cover the responses that a real server may send.
type FakeKubeAPI struct {
	url     string
	mu      sync.Mutex
	pods    map[string]string // JSON by name
	deleted chan string       // deleted pods, for the only watch
}

// StartFakeKubeAPI starts a server on a free port; it stops when the test ends. pods contains the
// JSON of each pod by name, as PodText returns it. The server takes ownership of the map.
func StartFakeKubeAPI(t *testing.T, pods map[string]string) *FakeKubeAPI {
	t.Helper()
	c := &FakeKubeAPI{pods: pods, deleted: make(chan string, 8)}
	s := httptest.NewServer(c)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	c.url = s.URL
	return c
}

// PodText returns the JSON of a ready pod whose container port "http" is the engine's port.
func PodText(name, app, url string) string {
	host, port, _ := strings.Cut(strings.TrimPrefix(url, "http://"), ":")
	return fmt.Sprintf(`{"kind":"Pod","apiVersion":"v1","metadata":{"name":%q,"namespace":"engines","labels":{"app":%q},"resourceVersion":"7"},`+
		`"spec":{"containers":[{"name":"engine","ports":[{"name":"http","containerPort":%s}]}]},`+
		`"status":{"phase":"Running","podIP":%q,"conditions":[{"type":"Ready","status":"True"}]}}`, name, app, port, host)
}

// Kubeconfig writes a kubeconfig file for the server, with the namespace engines, and returns its
// path.
func (c *FakeKubeAPI) Kubeconfig(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config")
	WriteFile(t, path, fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: c, clusters: [{name: k, cluster: {server: %q}}],
contexts: [{name: c, context: {cluster: k, namespace: engines}}]}`, c.url))
	return path
}

// Remove deletes a pod and reports the deletion to the watch. It blocks while eight earlier
// deletions are unread.
func (c *FakeKubeAPI) Remove(name string) {
	c.mu.Lock()
	pod := c.pods[name]
	delete(c.pods, name)
	c.mu.Unlock()
	c.deleted <- pod
}

// ServeHTTP serves the list and the watch of pods in the namespace engines whose label app is
// prefill or decode. The status of every other request is 404.
func (c *FakeKubeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	q := r.URL.Query()
	switch {
	case r.URL.Path != "/api/v1/namespaces/engines/pods" || q.Get("labelSelector") != "app in (prefill,decode)":
		w.WriteHeader(404)
	case q.Get("watch") == "":
		c.mu.Lock()
		items := []json.RawMessage{}
		for _, pod := range c.pods {
			items = append(items, json.RawMessage(pod))
		}
		c.mu.Unlock()
		json.NewEncoder(w).Encode(map[string]any{"kind": "PodList", "apiVersion": "v1", "metadata": map[string]string{"resourceVersion": "7"}, "items": items})
	default:
		w.(http.Flusher).Flush()
		for {
			select {
			case pod := <-c.deleted:
				fmt.Fprintf(w, `{"type":"DELETED","object":%s}`+"\n", strings.Replace(pod, `"resourceVersion":"7"`, `"resourceVersion":"8"`, 1))
				w.(http.Flusher).Flush()
			case <-r.Context().Done():
				return
			}
		}
	}
}
