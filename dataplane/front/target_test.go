package front

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/dataplane/http1"
)

// targets is a corpus of request targets with the path of each; "" for one that is refused.
var targets = map[string]string{
	chat:                            chat,
	"/":                             "/",
	"//":                            "//",
	"/a//b/../c/./%2e%2E/d":         "/a//b/../c/./%2e%2E/d",
	chat + "?":                      chat,
	chat + "?a=b&c=/d?e":            chat,
	"/?" + chat:                     "/",
	"http://a" + chat:               chat,
	"HTTPS://a.example:8443" + chat: chat,
	"http://a":                      "/",
	"http://a/":                     "/",
	"http://a?" + chat:              "/",
	"http://a?x=" + chat + "?y":     "/",
	"http://[::1]" + chat:           chat,
	"http://[::1]:80?" + chat:       "/",
	"http://127.0.0.1:80" + chat:    chat,
	"http://a_b-c.d~e" + chat:       chat,
	"http://a%41" + chat:            "",
	"http://a:" + chat:              chat,
	"http://a//" + chat:             "//" + chat,

	"":                             "",
	"http://a#" + chat:             "",
	"http://a" + chat + "#":        "",
	"http://a?#" + chat:            "",
	chat + "#a":                    "",
	"#" + chat:                     "",
	"?" + chat:                     "",
	"*":                            "",
	"a":                            "",
	"a:80":                         "",
	"v1/chat/completions":          "",
	"http:" + chat:                 "",
	"http:/" + chat:                "/chat/completions", // the host is v1
	"http://" + chat:               "",
	"http://?" + chat:              "",
	"http://:80" + chat:            "",
	"http://u@a" + chat:            "",
	"http://u:p@a" + chat:          "",
	"http://@a" + chat:             "",
	"http://a:b" + chat:            "",
	"http://a:1:2" + chat:          "",
	"http://a:-1" + chat:           "",
	"http://a%" + chat:             "",
	"http://a%4" + chat:            "",
	"http://a%4g" + chat:           "",
	"http://[::1" + chat:           "",
	"http://::1]" + chat:           "",
	"http://[a]" + chat:            "",
	"http://[1.2.3.4]" + chat:      "",
	"http://[fe80::1%25lo]" + chat: "",
	"http://[::1]a" + chat:         "",
	`http://a\b` + chat:            "",
	"http://a<b" + chat:            "",
	"ftp://a" + chat:               "",
	"file://a" + chat:              "",
	"file://" + chat:               "",
	"ws://a" + chat:                "",
	"httpx://a" + chat:             "",
	"xhttp://a" + chat:             "",
	"://a" + chat:                  "",
	"//a://b" + chat:               "//a://b" + chat,
	chat + "\x7f":                  "",
	chat + "\xc3\xa9":              "",
	chat + "?\xff":                 "",
	"http://\xc3\xa9" + chat:       "",
}

// targetPath reads a request head with this target.
func targetPath(method, target string) (path, refused string) {
	var h http1.Head
	refused = h.Parse([]byte(method), []byte(target), []byte("HTTP/1.1"), []byte("Host: a\r\n\r\n"))
	return string(h.Path), refused
}

func TestTargetPath(t *testing.T) {
	for target, want := range targets {
		path, refused := targetPath("POST", target)
		if path != want || (refused == "") != (want != "") {
			t.Errorf("%q: path %q, refused %q; want path %q", target, path, refused, want)
		}
	}
	for _, k := range []struct{ method, target, want string }{
		{"OPTIONS", "*", "*"}, {"GET", "*", ""}, {"CONNECT", "a:80", "a:80"}, {"CONNECT", "[::1]:80", "[::1]:80"}, {"CONNECT", "u@a:80", ""},
		{"OPTIONS", "/a?b", "/a"}, {"OPTIONS", "http://a", "/"},
	} {
		if path, _ := targetPath(k.method, k.target); path != k.want {
			t.Errorf("%s %s: path %q, want %q", k.method, k.target, path, k.want)
		}
	}
}

// TestTargetsAsProxiesRead sends the corpus to haproxy and to nginx. Each request that
// the router accepts has the same path for them, or they refuse it: no access rule of a
// proxy in front can be passed by writing a target in another form.
func TestTargetsAsProxiesRead(t *testing.T) {
	ask := func(t *testing.T, addr, target string) (status int, path string) {
		t.Helper()
		nc, err := net.Dial("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		_ = nc.SetDeadline(time.Now().Add(testTimeout))
		host := "a"
		if scheme, rest, ok := strings.Cut(target, "://"); ok && (strings.EqualFold(scheme, "http") || strings.EqualFold(scheme, "https")) { // haproxy compares them
			host, _, _ = strings.Cut(strings.NewReplacer("?", "/").Replace(rest), "/")
		}
		fmt.Fprintf(nc, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", target, host)
		resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
		if err != nil {
			return 0, ""
		}
		return resp.StatusCode, resp.Header.Get("Path")
	}
	compare := func(t *testing.T, addr string, plain func(path string) bool) {
		agree := 0
		for target, want := range targets {
			if want == "" || !plain(want) {
				continue
			}
			status, path := ask(t, addr, target)
			if path == "" {
				path = "/" // haproxy leaves an empty path as it is
			}
			if status == 200 && path != want {
				t.Errorf("%q: the proxy reads path %q, the router %q", target, path, want)
			}
			if status == 200 {
				agree++
			}
		}
		t.Logf("%d targets are read alike", agree)
		if agree < 8 {
			t.Errorf("only %d targets were accepted by both", agree)
		}
	}
	t.Run("haproxy", func(t *testing.T) {
		program := installed(t, "haproxy", "/usr/sbin/haproxy")
		addr := startHAProxy(t, program, "  mode http\n  http-request return status 200 hdr Path %[path]\n")
		compare(t, addr, func(string) bool { return true })
	})
	t.Run("nginx", func(t *testing.T) {
		program := installed(t, "nginx", "/usr/sbin/nginx")
		// nginx normalises $uri: only paths without anything to normalise are compared.
		compare(t, startNginx(t, program), func(path string) bool { return !strings.Contains(path, "//") && !strings.ContainsAny(path, "%") })
	})
}

// installed returns the path of a program, and skips the test if it is not installed.
func installed(t *testing.T, name, usual string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	if !isFile(usual) {
		t.Skip(name + " is not installed")
	}
	return usual
}

func startNginx(t *testing.T, program string) (addr string) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr = ln.Addr().String()
	_ = ln.Close()
	dir := t.TempDir()
	conf := filepath.Join(dir, "nginx.conf")
	text := fmt.Sprintf("daemon off; master_process off; pid %[1]s/pid; error_log stderr; events {}\nhttp { access_log off; client_body_temp_path %[1]s/a; proxy_temp_path %[1]s/b; fastcgi_temp_path %[1]s/c; uwsgi_temp_path %[1]s/d; scgi_temp_path %[1]s/e;\nserver { listen %[2]s; add_header Path $uri; location / { return 200; } } }\n", dir, addr)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	run := exec.Command(program, "-p", dir, "-c", conf)
	if err := run.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = run.Process.Kill(); _ = run.Wait() })
	testwait.Until(t, "nginx listens", func() bool {
		nc, err := net.Dial("tcp", addr)
		if err == nil {
			_ = nc.Close()
		}
		return err == nil
	})
	return addr
}
