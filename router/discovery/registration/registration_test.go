package registration

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/worker"
)

const token = "registration-token-1"

// sink is a discovery.Sink that accepts every worker.
type sink struct {
	mu sync.Mutex
	in map[string]worker.Spec
}

func (s *sink) Add(spec worker.Spec) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, there := s.in[spec.ID]; there {
		return fmt.Errorf("a worker %q is there already", spec.ID)
	}
	s.in[spec.ID] = spec
	return nil
}

func (s *sink) Remove(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.in, id)
	return nil
}

func (s *sink) get(id string) (worker.Spec, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	spec, ok := s.in[id]
	return spec, ok
}

type testServer struct {
	*Server
	*sink
	run *discovery.Runner
	log *bytes.Buffer
}

// serve starts a real listener on loopback.
func serve(t *testing.T, mod func(*Options)) *testServer {
	t.Helper()
	c := config.Default().Registration
	c.Listen, c.Token, c.Networks = "127.0.0.1:0", token, []string{"127.0.0.0/8", "10.1.0.0/16", "fd00::/8"}
	log := new(bytes.Buffer)
	opt := Options{Config: c, Log: slog.New(slog.NewTextHandler(&lockedWriter{w: log}, nil))}
	if mod != nil {
		mod(&opt)
	}
	s, err := New(opt)
	if err != nil {
		t.Fatal(err)
	}
	out := &testServer{Server: s, sink: &sink{in: map[string]worker.Spec{}}, log: log}
	out.run = discovery.NewRunner(out.sink, opt.Log)
	t.Cleanup(out.run.Close)
	if err := out.run.Start(s); err != nil {
		t.Fatal(err)
	}
	return out
}

type lockedWriter struct {
	mu sync.Mutex
	w  io.Writer
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

func (s *testServer) call(t *testing.T, method, path, tok, body string) (int, http.Header, string) {
	t.Helper()
	req, err := http.NewRequest(method, "http://"+s.Addr()+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if tok != "" {
		req.Header.Set("Authorization", "Bearer "+tok)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, resp.Header, string(b)
}

const plainAnnouncement = `{"version":1,"url":"http://127.0.0.1:8000","role":"decode"}`

func TestRegisterRenewDeregister(t *testing.T) {
	s := serve(t, nil)
	full := `{"version":1,"url":"http://*:8000","role":"prefill","models":["m"],"ranks":[0,1],"labels":["blue"],"engine":"sglang","health_path":"/healthz","block_size":64,
		"kv_events":["tcp://*:5557"],"kv_replay":["tcp://10.1.2.3:5657"],"load_events":["tcp://*:5757"],"bootstrap":{"port":8998},
		"max_requests":48,"rank_requests":32,"rank_tokens":65536,
		"nixl":{"host":"10.1.2.4","port":5600,"connector":true,"init_ports":[7300,7301],"alloc_ports":[7400,7401]},"lease_seconds":9}`
	status, _, body := s.call(t, "PUT", "/v1/workers/p-0", token, full)
	var l Lease
	if err := json.Unmarshal([]byte(body), &l); err != nil || status != 201 || l.LeaseSeconds != 9 || l.RenewSeconds != 3 || !l.Changed {
		t.Fatalf("%d %s", status, body)
	}
	spec, _ := s.get("p-0")
	want := worker.Spec{
		ID: "p-0", URL: "http://127.0.0.1:8000", Role: worker.Prefill, Models: []string{"m"}, Ranks: []uint16{0, 1}, Labels: []string{"blue"}, Engine: "sglang", HealthPath: "/healthz", BlockSize: 64,
		KVEvents: []string{"tcp://127.0.0.1:5557"}, KVReplay: []string{"tcp://10.1.2.3:5657"}, LoadEvents: []string{"tcp://127.0.0.1:5757"}, Source: "register", Networks: spec.Networks,
		MaxRequests: 48, RankRequests: 32, RankTokens: 65536,
		Options: map[string][]string{"connector": {"true"}, "bootstrap_port": {"8998"}, "peer_host": {"10.1.2.4"}, "nixl_port": {"5600"}, "init_port": {"7300", "7301"}, "alloc_port": {"7400", "7401"}},
	}
	if fmt.Sprint(spec) != fmt.Sprint(want) || len(spec.Networks) != 3 {
		t.Errorf("got  %+v\nwant %+v", spec, want)
	}
	if status, _, body = s.call(t, "PUT", "/v1/workers/p-0", token, full); status != 200 || !strings.Contains(body, `"changed":false`) {
		t.Errorf("the same again: %d %s", status, body)
	}
	if status, _, _ = s.call(t, "POST", "/v1/workers/p-0/renew", token, ""); status != 200 {
		t.Errorf("renew: %d", status)
	}
	if status, _, body = s.call(t, "PUT", "/v1/workers/p-0", token, strings.Replace(full, "8000", "8001", 1)); status != 201 {
		t.Errorf("another URL: %d %s", status, body)
	}
	if spec, _ = s.get("p-0"); spec.URL != "http://127.0.0.1:8001" {
		t.Errorf("URL %s after the change", spec.URL)
	}
	if status, _, body = s.call(t, "GET", "/v1/workers", token, ""); status != 200 || !strings.Contains(body, `"id":"p-0"`) || !strings.Contains(body, `"from":"127.0.0.1"`) {
		t.Errorf("list: %d %s", status, body)
	}
	if status, _, _ = s.call(t, "DELETE", "/v1/workers/p-0", token, ""); status != 204 {
		t.Errorf("delete: %d", status)
	}
	if _, in := s.get("p-0"); in {
		t.Error("it is in after it deregistered")
	}
	for _, call := range [][2]string{{"DELETE", "/v1/workers/p-0"}, {"POST", "/v1/workers/p-0/renew"}} {
		if status, _, body = s.call(t, call[0], call[1], token, ""); status != 404 || !strings.Contains(body, "not_registered") {
			t.Errorf("%v of what is not there: %d %s", call, status, body)
		}
	}
}

func TestLeaseEnds(t *testing.T) {
	s := serve(t, func(o *Options) { o.Config.Lease = time.Second })
	begun := time.Now()
	for _, id := range []string{"kept", "lost"} {
		if status, _, body := s.call(t, "PUT", "/v1/workers/"+id, token, strings.Replace(plainAnnouncement, "8000", map[string]string{"kept": "1", "lost": "2"}[id], 1)); status != 201 {
			t.Fatalf("%d %s", status, body)
		}
	}
	testwait.Until(t, "the lease of the one not heard of ends", func() bool {
		s.call(t, "POST", "/v1/workers/kept/renew", token, "")
		_, in := s.get("lost")
		return !in
	})
	if took := time.Since(begun); took < time.Second || took > 5*time.Second {
		t.Errorf("after %v; want a second", took)
	}
	if _, in := s.get("kept"); !in {
		t.Error("the one that renewed is out too")
	}
}

func TestCallerAuthentication(t *testing.T) {
	s := serve(t, nil)
	for name, tok := range map[string]string{"none": "", "wrong": "registration-token-2", "a prefix": token[:10], "longer": token + "x"} {
		for _, call := range [][2]string{{"PUT", "/v1/workers/a"}, {"GET", "/v1/workers"}, {"GET", "/v1/connector"}, {"GET", "/nothing"}} {
			if status, h, _ := s.call(t, call[0], call[1], tok, plainAnnouncement); status != 401 || h.Get("WWW-Authenticate") == "" {
				t.Errorf("token %s: %v answered %d", name, call, status)
			}
		}
	}
	if strings.Contains(s.log.String(), token) {
		t.Error("the token is in the log")
	}
}

// TestOtherNetworksAreRejected checks that a caller from outside the networks gets no response at
// all.
func TestOtherNetworksAreRejected(t *testing.T) {
	s := serve(t, func(o *Options) { o.Config.Networks = []string{"10.1.0.0/16"} })
	req, _ := http.NewRequest("GET", "http://"+s.Addr()+"/v1/workers", nil)
	req.Header.Set("Authorization", "Bearer "+token)
	if resp, err := http.DefaultClient.Do(req); err == nil {
		t.Errorf("answered %d", resp.StatusCode)
	}
}

// TestAddressesMustLieInTheNetworks checks that an address outside the networks is rejected in
// every field and every notation.
func TestAddressesMustLieInTheNetworks(t *testing.T) {
	s := serve(t, nil)
	tried := 0
	for _, host := range []string{"169.254.169.254", "192.168.0.1", "localhost", "metadata.internal", "2001:db8::1", "[2001:db8::1]", "[fe80::1%25eth0]", "0x7f.1", "2130706433", "127.1", "[::ffff:8.8.8.8]", "user@127.0.0.1"} {
		for field, body := range map[string]string{
			"url":       `{"version":1,"url":"http://%s:8000"}`,
			"rank_urls": `{"version":1,"url":"http://127.0.0.1:8000","ranks":[0],"rank_urls":["http://%s:80"]}`,
			"kv_events": `{"version":1,"url":"http://127.0.0.1:8000","kv_events":["tcp://%s:5557"]}`,
			"kv_replay": `{"version":1,"url":"http://127.0.0.1:8000","kv_events":["tcp://*:5557"],"kv_replay":["tcp://%s:5557"]}`,
			"bootstrap": `{"version":1,"url":"http://127.0.0.1:8000","role":"prefill","bootstrap":{"host":"%s","port":8998}}`,
			"nixl":      `{"version":1,"url":"http://127.0.0.1:8000","nixl":{"host":"%s","port":5600}}`,
		} {
			h := host
			if field == "bootstrap" || field == "nixl" {
				h = strings.Trim(host, "[]")
			}
			tried++
			if status, _, answer := s.call(t, "PUT", "/v1/workers/a", token, fmt.Sprintf(body, h)); status != 400 {
				t.Errorf("%s with host %s: %d %s", field, host, status, answer)
			}
		}
	}
	if _, in := s.get("a"); in {
		t.Error("one of them is in")
	}
	t.Logf("reliability 14: %d registrations that name such a host, in every field that takes one, were refused", tried)
	for _, good := range []string{"http://10.1.200.3:80", "http://[fd00::7]:8000", "http://0.0.0.0:8000", "http://[::ffff:10.1.0.9]:8000", "https://127.0.0.1"} {
		if status, _, answer := s.call(t, "PUT", "/v1/workers/a", token, `{"version":1,"url":"`+good+`"}`); status/100 != 2 {
			t.Errorf("%s: %d %s", good, status, answer)
		}
	}
}

// TestWideNetworksMeanHosts checks that a wide network such as 0.0.0.0/0 includes neither
// link-local addresses nor addresses that are not unicast. It includes loopback addresses only for
// a caller on loopback.
func TestWideNetworksMeanHosts(t *testing.T) {
	wide := func(o *Options) { o.Config.Networks = []string{"0.0.0.0/0", "::/0"} }
	s := serve(t, wide)
	put := func(s *testServer, url string) (int, string) {
		status, _, answer := s.call(t, "PUT", "/v1/workers/a", token, `{"version":1,"url":"`+url+`"}`)
		return status, answer
	}
	for host, why := range map[string]string{
		"169.254.169.254": "link-local", "[fe80::1]": "link-local", "[::ffff:169.254.169.254]": "link-local",
		"224.0.0.1": "not an address of one host", "[ff02::1]": "not an address of one host", "255.255.255.255": "not an address of one host", "[::ffff:0.0.0.0]": "not an address of one host",
	} {
		if status, answer := put(s, "http://"+host+":8000"); status != 400 || !strings.Contains(answer, why) {
			t.Errorf("%s: %d %s; want 400, %q", host, status, answer, why)
		}
	}
	for _, url := range []string{"http://10.1.2.3:8000", "http://[2001:db8::1]:8000", "http://127.0.0.1:8000", "http://*:8000"} {
		if status, answer := put(s, url); status/100 != 2 {
			t.Errorf("%s: %d %s", url, status, answer)
		}
	}
	named := serve(t, func(o *Options) { wide(o); o.Config.Networks = append(o.Config.Networks, "169.254.7.0/24") })
	if status, answer := put(named, "http://169.254.7.9:8000"); status/100 != 2 {
		t.Errorf("named by a network of its own: %d %s", status, answer)
	}
	for caller, want := range map[string]bool{"127.0.0.1": true, "10.0.0.9": false} {
		at := scopeOf(netip.MustParseAddr(caller), []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")})
		if _, err := at.url("url", "http://127.0.0.1:8000"); (err == nil) != want {
			t.Errorf("loopback, named by %s: %v", caller, err)
		}
	}
	at := scopeOf(netip.MustParseAddr("169.254.0.7"), []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0")})
	if _, err := at.url("url", "http://*:8000"); err == nil {
		t.Error("a caller with a link-local address names itself")
	}
}

func TestBadAnnouncements(t *testing.T) {
	s := serve(t, nil)
	many := strings.TrimSuffix(strings.Repeat(`"m",`, 300), ",")
	for name, c := range map[string]struct{ body, want string }{
		"no JSON":             {`{`, "not an announcement"},
		"two":                 {plainAnnouncement + plainAnnouncement, "more than one"},
		"no version":          {`{"url":"http://127.0.0.1:1"}`, "version: 0; want 1"},
		"another version":     {`{"version":2,"url":"http://127.0.0.1:1"}`, "want 1"},
		"unknown field":       {`{"version":1,"url":"http://127.0.0.1:1","modles":["m"]}`, "modles"},
		"wrong type":          {`{"version":1,"url":7}`, "url: a number"},
		"role":                {`{"version":1,"url":"http://127.0.0.1:1","role":"decoder"}`, "prefill, decode or aggregated"},
		"engine":              {`{"version":1,"url":"http://127.0.0.1:1","engine":"vlm"}`, `did you mean \"vllm\"`},
		"scheme":              {`{"version":1,"url":"file:///etc/passwd"}`, "not a URL"},
		"query":               {`{"version":1,"url":"http://127.0.0.1:1/?x=1"}`, "query"},
		"ipc":                 {`{"version":1,"url":"http://127.0.0.1:1","kv_events":["ipc:///tmp/x"]}`, "tcp://ADDRESS:PORT"},
		"load over ipc":       {`{"version":1,"url":"http://127.0.0.1:1","load_events":["ipc:///tmp/x"]}`, "load_events[0]"},
		"load elsewhere":      {`{"version":1,"url":"http://127.0.0.1:1","load_events":["tcp://8.8.8.8:5757"]}`, "registration.networks"},
		"negative bound":      {`{"version":1,"url":"http://127.0.0.1:1","rank_requests":-1}`, "rank_requests: -1"},
		"bind":                {`{"version":1,"url":"http://127.0.0.1:1","kv_events":["bind:tcp://*:5557"]}`, "tcp://ADDRESS:PORT"},
		"rank twice":          {`{"version":1,"url":"http://127.0.0.1:1","ranks":[1,1]}`, "rank 1 is listed twice"},
		"negative rank":       {`{"version":1,"url":"http://127.0.0.1:1","ranks":[-1]}`, "ranks"},
		"block size":          {`{"version":1,"url":"http://127.0.0.1:1","block_size":-5}`, "block_size: -5"},
		"a model's direction": {"{\"version\":1,\"url\":\"http://127.0.0.1:1\",\"models\":[\"m\",\"a\u202eb\"]}", `models[1]: \"a\\u202eb\" is not a model name`},
		"a model's control":   {`{"version":1,"url":"http://127.0.0.1:1","models":["a\u009bb"]}`, `models[0]: \"a\\u009bb\" is not a model name`},
		"a label's width":     {`{"version":1,"url":"http://127.0.0.1:1","labels":["a\u200bb"]}`, `labels[0]: \"a\\u200bb\" is not a label`},
		"many models":         {`{"version":1,"url":"http://127.0.0.1:1","models":[` + many + `]}`, "want at most 256"},
		"bootstrap port":      {`{"version":1,"url":"http://127.0.0.1:1","bootstrap":{"port":70000}}`, "bootstrap.port: 70000"},
		"nixl port":           {`{"version":1,"url":"http://127.0.0.1:1","nixl":{"port":-1}}`, "nixl.port: -1"},
		"nixl init ports":     {`{"version":1,"url":"http://127.0.0.1:1","nixl":{"init_ports":[0]}}`, "init_port"},
		"a long lease":        {`{"version":1,"url":"http://127.0.0.1:1","lease_seconds":86400}`, "1 to 300"},
		"a negative rank":     {`{"version":1,"url":"http://127.0.0.1:1","start_rank":-5}`, "start_rank: -5; want from 0 to 65535"},
		"a large rank":        {`{"version":1,"url":"http://127.0.0.1:1","start_rank":65536}`, "start_rank: 65536; want from 0 to 65535"},
		"a negative lease":    {`{"version":1,"url":"http://127.0.0.1:1","lease_seconds":-1}`, "1 to 300"},
	} {
		status, _, body := s.call(t, "PUT", "/v1/workers/a", token, c.body)
		if status != 400 || !strings.Contains(body, c.want) {
			t.Errorf("%s: %d %s; want 400 with %q", name, status, body, c.want)
		}
	}
	if status, _, body := s.call(t, "PUT", "/v1/workers/a", token, `{"version":1,"labels":["`+strings.Repeat("x", maxBody)+`"]}`); status != 413 {
		t.Errorf("a large body: %d %s", status, body)
	}
	if status, _, body := s.call(t, "PUT", "/v1/workers/a%2Fb%20c", token, plainAnnouncement); status != 400 || !strings.Contains(body, "id") {
		t.Errorf("a bad id: %d %s", status, body)
	}
}

func TestIDsAreOwned(t *testing.T) {
	s := serve(t, func(o *Options) { o.Config.MaxWorkers = 2 })
	if err := s.Add(worker.Spec{ID: "static"}); err != nil {
		t.Fatal(err)
	}
	if status, _, body := s.call(t, "PUT", "/v1/workers/static", token, plainAnnouncement); status != 409 || !strings.Contains(body, "already") {
		t.Errorf("the id of another source: %d %s", status, body)
	}
	if status, _, body := s.call(t, "PUT", "/v1/workers/a", token, plainAnnouncement); status != 201 {
		t.Fatalf("%d %s", status, body)
	}
	// The caller has another loopback address.
	from := &http.Client{Transport: &http.Transport{DialContext: (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 2)}}).DialContext}}
	defer from.CloseIdleConnections()
	for method, want := range map[string]int{"PUT": 409, "DELETE": 403} {
		req, _ := http.NewRequest(method, "http://"+s.Addr()+"/v1/workers/a", strings.NewReader(plainAnnouncement))
		req.Header.Set("Authorization", "Bearer "+token)
		resp, err := from.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%s from another address: %d; want %d", method, resp.StatusCode, want)
		}
	}
	s.call(t, "PUT", "/v1/workers/b", token, strings.Replace(plainAnnouncement, "8000", "8001", 1))
	if status, h, body := s.call(t, "PUT", "/v1/workers/c", token, strings.Replace(plainAnnouncement, "8000", "8002", 1)); status != 429 || h.Get("Retry-After") == "" {
		t.Errorf("over max_workers: %d %s", status, body)
	}
}

func TestExpiryAfterProcessPause(t *testing.T) {
	set := discovery.NewSet("test", &sink{in: map[string]worker.Spec{}}, nil)
	l := newLeases()
	l.setMax(10)
	l.start(set, nil, slog.New(slog.DiscardHandler))
	if _, err := l.put("a", netip.Addr{}, worker.Spec{ID: "a"}, 15*time.Second); err != nil {
		t.Fatal(err)
	}
	// Simulates a process that was suspended for a minute since the last call of expire.
	l.mu.Lock()
	l.lastExpiryCheck = l.lastExpiryCheck.Add(-time.Minute)
	l.byID["a"].ends = l.byID["a"].ends.Add(-time.Minute)
	l.mu.Unlock()
	if ended := l.expire(); len(ended) != 0 {
		t.Errorf("%v taken out for not being heard while nobody listened", ended)
	}
	l.mu.Lock()
	l.byID["a"].ends = time.Now().Add(-time.Millisecond)
	l.mu.Unlock()
	if ended := l.expire(); len(ended) != 1 {
		t.Error("it is never removed")
	}
}

// keyPair writes a certificate and its key, signed by ca or, if ca is nil, self-signed.
func keyPair(t *testing.T, dir, name string, ca *tls.Certificate) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: ca == nil, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}}
	parent, signer := tmpl, any(key)
	if ca != nil {
		parent, signer = ca.Leaf, ca.PrivateKey
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	certPEM, keyPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: raw})
	for suffix, b := range map[string][]byte{".crt": certPEM, ".key": keyPEM} {
		if err := os.WriteFile(filepath.Join(dir, name+suffix), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	if err != nil {
		t.Fatal(err)
	}
	return pair
}

// TestCertificates checks that a caller needs a client certificate of the router's CA, and no
// token, if a CA is configured.
func TestCertificates(t *testing.T) {
	dir := t.TempDir()
	ca := keyPair(t, dir, "ca", nil)
	keyPair(t, dir, "router", &ca)
	mine, strangers := keyPair(t, dir, "worker", &ca), keyPair(t, dir, "stranger", nil)
	s := serve(t, func(o *Options) {
		o.Config.Token = ""
		o.Config.TLSCert, o.Config.TLSKey, o.Config.ClientCA = filepath.Join(dir, "router.crt"), filepath.Join(dir, "router.key"), filepath.Join(dir, "ca.crt")
	})
	roots := x509.NewCertPool()
	roots.AddCert(ca.Leaf)
	with := func(certs ...tls.Certificate) (*Lease, error) {
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: certs}}
		defer tr.CloseIdleConnections()
		c := &Client{Router: "https://" + s.Addr(), ID: "a", HTTP: &http.Client{Transport: tr}}
		body, _ := json.Marshal(&Announcement{Version: 1, URL: "http://*:8000"})
		l, _, err := c.put(context.Background(), body)
		return l, err
	}
	if l, err := with(mine); err != nil || !l.Changed {
		t.Errorf("with a good certificate: %v", err)
	}
	if _, err := with(strangers); err == nil {
		t.Error("a stranger's certificate is taken")
	}
	if _, err := with(); err == nil {
		t.Error("no certificate is needed")
	}

	// A CA that is removed from the file is no longer trusted, without a restart.
	other, err := os.ReadFile(filepath.Join(dir, "stranger.crt"))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "ca.crt"), other, 0o600); err != nil {
		t.Fatal(err)
	}
	testwait.Until(t, "the old authority is refused", func() bool { _, err := with(mine); return err != nil })
	if _, err := with(strangers); err != nil {
		t.Errorf("the new authority: %v", err)
	}
}

// TestClientKeepsAWorkerRegistered checks that the client keeps its worker registered through a
// restart of the router, and deregisters it at the end.
func TestClientKeepsAWorkerRegistered(t *testing.T) {
	s := serve(t, func(o *Options) { o.Config.Lease = time.Second })
	ctx, cancel := context.WithCancel(context.Background())
	c := &Client{Router: "http://" + s.Addr(), Token: token, ID: "a"}
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, &Announcement{Version: 1, URL: "http://*:8000"}) }()
	in := func() bool { _, in := s.get("a"); return in }
	testwait.Until(t, "it is in", in)
	testwait.Holds(t, 1500*time.Millisecond, "it renews its lease", in)
	// Simulates a restarted router, which knows no worker.
	s.leases.mu.Lock()
	s.leases.set.Remove("a")
	delete(s.leases.byID, "a")
	s.leases.mu.Unlock()
	testwait.Until(t, "it registered again", in)
	cancel()
	if err := <-done; err != nil || in() {
		t.Errorf("%v; in after its end: %v", err, in())
	}
	c.Token = "registration-token-2"
	if err := c.Run(context.Background(), &Announcement{Version: 1, URL: "http://*:8000"}); err == nil || !strings.Contains(err.Error(), "401") {
		t.Errorf("a wrong token: %v", err)
	}
}

// TestReload checks that changed settings apply and that registered workers stay.
func TestReload(t *testing.T) {
	s := serve(t, func(o *Options) { o.Config.MaxWorkers = 1 })
	put := func(id, tok string, lease int) int {
		t.Helper()
		status, _, _ := s.call(t, "PUT", "/v1/workers/"+id, tok, fmt.Sprintf(`{"version":1,"url":"http://127.0.0.1:9","role":"decode","lease_seconds":%d}`, lease))
		return status
	}
	if put("a", token, 5) != 201 || put("b", token, 5) != 429 {
		t.Fatal("before")
	}
	const other = "registration-token-2"
	s.Reload(Settings{Token: other, Lease: time.Minute, MaxLease: time.Minute, MaxWorkers: 2})
	if put("b", token, 5) != 401 || put("b", other, 61) != 400 || put("b", other, 60) != 201 || put("c", other, 5) != 429 {
		t.Error("the new terms do not hold")
	}
	s.Reload(Settings{Token: other, Lease: time.Minute, MaxLease: time.Minute, MaxWorkers: 1})
	if put("a", other, 5) != 200 || put("b", other, 5) != 200 {
		t.Error("who is registered may not renew, for there are too many")
	}
}

// TestAnnounceCoversAllFields checks that an Announcement has every field of a worker on the
// command line.
func TestAnnounceCoversAllFields(t *testing.T) {
	w, err := config.ParseWorker(worker.Prefill, "http://*:8000,model=m,ranks=2,label=blue,engine=sglang,health_path=/healthz,block_size=64,kv_events=tcp://*:5557,kv_replay=tcp://*:5657,"+
		"load_events=tcp://*:5757,max_requests=48,rank_requests=32,rank_tokens=65536,bootstrap_port=8998,bootstrap_host=10.1.2.3,init_port=7300,alloc_port=7400,peer_host=10.1.2.4,connector=true")
	if err != nil {
		t.Fatal(err)
	}
	a, err := Announce(&w)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	if a, err = Decode(text); err != nil {
		t.Fatal(err)
	}
	within := []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
	got, err := a.spec("p", scopeOf(netip.MustParseAddr("10.1.0.9"), within))
	if err != nil {
		t.Fatal(err)
	}
	w.ID, w.URL, w.KVEvents, w.KVReplay, w.LoadEvents = "p", "http://10.1.0.9:8000", []string{"tcp://10.1.0.9:5557"}, []string{"tcp://10.1.0.9:5657"}, []string{"tcp://10.1.0.9:5757"}
	want := w.Spec("register")
	want.Networks = within
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
}

// TestKnownWorkersMustLieInTheNetworks checks that a router inherits only the workers that its own
// configuration allows; the predecessor's may differ.
func TestKnownWorkersMustLieInTheNetworks(t *testing.T) {
	from := netip.MustParseAddr("127.0.0.1")
	old := []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("192.168.0.0/16")}
	known := func(id string, change func(*worker.Spec)) KnownWorker {
		k := KnownWorker{ID: id, Owner: from, Lease: 5 * time.Second, Spec: worker.Spec{ID: id, URL: "http://10.1.2.3:8000", KVEvents: []string{"auto"}, Networks: old, Source: "register"}}
		change(&k.Spec)
		return k
	}
	s := serve(t, func(o *Options) {
		o.KnownWorkers = []KnownWorker{
			known("stays", func(*worker.Spec) {}),
			known("url", func(s *worker.Spec) { s.URL = "http://192.168.0.1:8000" }),
			known("rank url", func(s *worker.Spec) { s.RankURLs = []string{"http://10.1.2.3:8000", "http://192.168.0.1:8000"} }),
			known("events", func(s *worker.Spec) { s.KVEvents = []string{"tcp://192.168.0.1:5557"} }),
			known("load", func(s *worker.Spec) { s.LoadEvents = []string{"tcp://192.168.0.1:5557"} }),
			known("bootstrap", func(s *worker.Spec) { s.Options = map[string][]string{"bootstrap_host": {"192.168.0.1"}} }),
			{ID: "owner", Owner: netip.MustParseAddr("192.168.0.1"), Lease: time.Second, Spec: worker.Spec{URL: "http://10.1.2.3:8000"}},
			{ID: "lease", Owner: from, Lease: 24 * time.Hour, Spec: worker.Spec{URL: "http://10.1.2.3:8000"}},
		}
	})
	testwait.Until(t, "one is in", func() bool { _, in := s.get("stays"); return in })
	// The listener responds only after all inherited workers have been checked.
	if status, _, _ := s.call(t, "GET", "/v1/workers", token, ""); status != 200 {
		t.Fatal(status)
	}
	for _, k := range s.opt.KnownWorkers[1:] {
		if _, in := s.get(k.ID); in {
			t.Errorf("%s is in", k.ID)
		}
	}
	if spec, _ := s.get("stays"); !reflect.DeepEqual(spec.Networks, s.networks) {
		t.Errorf("networks %v; want those of now, %v", spec.Networks, s.networks)
	}
}
