package front

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

func preflight(path string, fields ...string) string {
	return "OPTIONS " + path + " HTTP/1.1\r\nHost: a\r\n" + strings.Join(append(fields, ""), "\r\n") + "\r\n"
}

func TestCORS(t *testing.T) {
	const app, other = "https://app.example", "https://app.example.evil"
	exact := &CORS{Origins: []string{app, "http://localhost:3000"}, MaxAge: 10 * time.Minute}
	all := &CORS{Origins: []string{"*"}, Methods: []string{"POST"}, Headers: []string{"*", "Authorization"}}
	for _, k := range []struct {
		name, raw string
		cors      *CORS
		status    int
		calls     int64
		want      map[string]string // header lines of the answer; "" for none
	}{
		{"off", chatPost(hello, "Origin: "+app), nil, 200, 1, map[string]string{"Access-Control-Allow-Origin": "", "Vary": ""}},
		{"off, preflight", preflight(chat, "Origin: "+app, "Access-Control-Request-Method: POST"), nil, 405, 0, map[string]string{"Access-Control-Allow-Origin": ""}},
		{"preflight", preflight(chat, "Origin: "+app, "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: authorization, content-type"), exact, 204, 0,
			map[string]string{"Access-Control-Allow-Origin": app, "Access-Control-Allow-Methods": "GET, POST", "Access-Control-Allow-Headers": corsHeaders, "Access-Control-Max-Age": "600", "Vary": "Origin", "Access-Control-Allow-Credentials": ""}},
		{"preflight of a page", preflight("/v1/models", "Origin: "+app, "Access-Control-Request-Method: GET"), exact, 204, 0, map[string]string{"Access-Control-Allow-Origin": app}},
		{"preflight of another", preflight(chat, "Origin: "+other, "Access-Control-Request-Method: POST"), exact, 403, 0,
			map[string]string{"Access-Control-Allow-Origin": "", "Vary": "Origin", "X-Sluice-Reason": "origin_refused"}},
		{"preflight of nowhere", preflight("/nothing", "Origin: "+app, "Access-Control-Request-Method: POST"), exact, 404, 0, nil},
		{"OPTIONS that is none", preflight(chat, "Origin: "+app), exact, 405, 0, map[string]string{"Access-Control-Allow-Origin": app}},
		{"preflight, all", preflight(chat, "Origin: null", "Access-Control-Request-Method: POST"), all, 204, 0,
			map[string]string{"Access-Control-Allow-Origin": "*", "Access-Control-Allow-Methods": "POST", "Access-Control-Allow-Headers": "*, Authorization", "Access-Control-Max-Age": "0", "Vary": ""}},
		{"request", chatPost(hello, "Origin: "+app), exact, 200, 1,
			map[string]string{"Access-Control-Allow-Origin": app, "Access-Control-Expose-Headers": corsExposed, "Vary": "Origin, Accept-Encoding"}},
		{"request of another", chatPost(hello, "Origin: "+other), exact, 200, 1, map[string]string{"Access-Control-Allow-Origin": "", "Vary": "Origin, Accept-Encoding"}},
		{"request without", chatPost(hello), exact, 200, 1, map[string]string{"Access-Control-Allow-Origin": "", "Vary": "Origin, Accept-Encoding"}},
		{"error", chatPost("nonsense", "Origin: "+app), exact, 400, 0, map[string]string{"Access-Control-Allow-Origin": app}},
	} {
		t.Run(k.name, func(t *testing.T) {
			r := start(t, Options{CORS: k.cors, CompressMin: 1}, func(x Exchange) {
				if x.ForwardFields(nil)[0].Name == "Origin" {
					t.Error("the origin goes on to the engine")
				}
				echo(x)
			})
			if k.cors == nil {
				r = start(t, Options{}, echo)
			}
			c := r.dial()
			c.send(k.raw)
			resp, body := c.readResponse()
			if resp.StatusCode != k.status || r.calls.Load() != k.calls {
				t.Errorf("%d after %d calls of the handler, want %d after %d: %s", resp.StatusCode, r.calls.Load(), k.status, k.calls, body)
			}
			for name, want := range k.want {
				if got := strings.Join(resp.Header.Values(name), ", "); got != want {
					t.Errorf("%s: %q, want %q", name, got, want)
				}
			}
			if resp.StatusCode == 204 && (body != "" || resp.Header.Get("Content-Length") != "") {
				t.Errorf("a 204 with Content-Length %q and body %q", resp.Header.Get("Content-Length"), body)
			}
			c.send(chatPost(hello)) // the connection serves another request
			if resp, _ := c.readResponse(); resp.StatusCode != 200 {
				t.Errorf("afterwards: %d", resp.StatusCode)
			}
		})
	}
}

// An API key is required for the real request, but not for the preflight.
func TestCORSWithKeys(t *testing.T) {
	r := start(t, Options{CORS: &CORS{Origins: []string{"*"}}, Authenticator: closedGate{}}, echo)
	c := r.dial()
	c.send(preflight(chat, "Origin: https://a.example", "Access-Control-Request-Method: POST"))
	if resp, _ := c.readResponse(); resp.StatusCode != 204 {
		t.Errorf("preflight: %d", resp.StatusCode)
	}
	c.send(chatPost(hello, "Origin: https://a.example"))
	if resp, _ := c.readResponse(); resp.StatusCode != 401 || resp.Header.Get("Access-Control-Allow-Origin") != "*" {
		t.Errorf("request: %d %v", resp.StatusCode, resp.Header)
	}
}

type closedGate struct{}

func (closedGate) Authenticate([]byte, bool) (Principal, *Rejection) {
	return nil, &Rejection{Reason: MissingKey, Message: "a key is wanted"}
}

// An engine's own CORS lines are not forwarded, because they allow only origins of the engine.
func TestCORSOfEngines(t *testing.T) {
	e := startEngine(t, func(w net.Conn, _ *http.Request) bool {
		_, _ = io.WriteString(w, strings.Replace(streamHead, "\r\n\r\n", "\r\nAccess-Control-Allow-Origin: *\r\naccess-control-allow-credentials: true\r\nVary: X-Engine\r\n\r\n", 1)+chunk("data: [DONE]\n\n")+"0\r\n\r\n")
		return true
	})
	for _, cors := range []*CORS{nil, {Origins: []string{"https://a.example"}}} {
		r := start(t, Options{CORS: cors}, relayTo(e, func() RelayHooks { return RelayHooks{} }))
		c := r.dial()
		c.send(chatPost(`{"stream":true}`, "Origin: https://a.example"))
		resp, _ := c.readResponse()
		var want []string
		vary := []string{"X-Engine"}
		if cors != nil {
			want, vary = []string{"https://a.example"}, []string{"X-Engine", "Origin"}
		}
		if got := resp.Header.Values("Access-Control-Allow-Origin"); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("with %v: %v, want %v", cors != nil, got, want)
		}
		if got := resp.Header.Values("Vary"); !slices.Equal(got, vary) {
			t.Errorf("with %v: Vary %q, want %q", cors != nil, got, vary)
		}
		if resp.Header.Get("Access-Control-Allow-Credentials") != "" {
			t.Error("the engine's Access-Control-Allow-Credentials came through")
		}
	}
}

// Pages may read every response header line that the README lists.
func TestExposedHeadersAreDocumented(t *testing.T) {
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, row, _ := strings.Cut(string(text), "| response headers |")
	row, _, _ = strings.Cut(row, "\n")
	names := regexp.MustCompile("`(X-[A-Za-z-]+)`").FindAllStringSubmatch(row, -1)
	if len(names) < 9 {
		t.Fatalf("the README names %v", names)
	}
	exposed := strings.Split(corsExposed, ", ")
	for _, n := range names {
		if !slices.Contains(exposed, n[1]) {
			t.Errorf("%s is not exposed", n[1])
		}
	}
}
