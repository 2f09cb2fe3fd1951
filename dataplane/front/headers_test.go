package front

import (
	"os"
	"slices"
	"strings"
	"testing"

	"sluice/dataplane/upstream"
)

// TestClientHeaders sends each header of the table, in several spellings, with and
// without keys of the router's own, and looks at what an engine would be sent.
func TestClientHeaders(t *testing.T) {
	kept := []string{"Accept", "Anthropic-Version", "Anthropic-Beta", "OpenAI-Beta", "User-Agent", "traceparent", "tracestate", "X-Session-ID", "X-Smg-Routing-Key", "X-Other", "X", "Cookies", "X-Api-Keys", "X-Forwarded", "Xx-Forwarded-For"}
	for _, own := range []bool{false, true} {
		var got []string
		r := start(t, Options{OwnKeys: own}, func(x *Exchange) {
			for _, f := range x.ForwardFields(nil) {
				got = append(got, strings.ToLower(strings.Clone(f.Name))) // it is borrowed
			}
			x.ReplyJSON(200, nil)
		})
		ask := func(name string) (forwarded bool) {
			got = nil
			c := r.dial()
			value := "secret"
			if strings.EqualFold(name, "Connection") {
				value = "close"
			}
			c.send(chatPost(hello, name+": "+value))
			if resp, body := c.answer(); resp.StatusCode != 200 {
				t.Fatalf("%s: %d %s", name, resp.StatusCode, body)
			}
			return slices.Contains(got, strings.ToLower(name))
		}
		for _, name := range kept {
			if !ask(name) {
				t.Errorf("keys of our own %v: %s is not forwarded", own, name)
			}
		}
		for name, class := range headerTable {
			switch name {
			case "content-length", "transfer-encoding", "host", "expect", "content-encoding": // of the request's own framing
				continue
			}
			for _, spelt := range []string{strings.ReplaceAll(name, "*", "a"), strings.ToUpper(strings.ReplaceAll(name, "*", "Any-Thing")), strings.ReplaceAll(name, "*", "")} {
				if want := class == headerKey && !own; ask(spelt) != want {
					t.Errorf("keys of our own %v: %s is forwarded: %v, want %v", own, spelt, !want, want)
				}
			}
		}
	}
}

// A detached exchange's header lines are its maker's; credentials are none of them.
func TestDetachedHeaders(t *testing.T) {
	x, err := NewExchange(&Detached{Endpoint: &Endpoints[0], Body: []byte(`{}`), Party: struct{ Party }{}, Fields: []upstream.Field{{Name: "Cookie", Value: "a"}, {Name: "X-Sluice-Worker", Value: "a"}, {Name: "X-Forwarded-For", Value: "::1"}}})
	if err != nil {
		t.Fatal(err)
	}
	if got := x.ForwardFields(nil); len(got) != 2 || got[0].Name != "X-Forwarded-For" || got[1].Name != "Content-Type" {
		t.Errorf("%v", got)
	}
}

// The documented table is the one that is used.
func TestHeaderTableIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/access.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := strings.ToLower(string(text))
	for name := range headerTable {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("docs/access.md does not name `%s`", name)
		}
		if len(name) > maxHeaderName {
			t.Errorf("maxHeaderName is less than the length of %s", name)
		}
	}
}

func BenchmarkClassOf(b *testing.B) {
	names := [][]byte{[]byte("Host"), []byte("User-Agent"), []byte("Accept"), []byte("Content-Type"), []byte("Content-Length"), []byte("Authorization"), []byte("X-Stainless-Package-Version"), []byte("X-Stainless-Lang"), []byte("Accept-Encoding"), []byte("Connection")}
	for b.Loop() {
		for _, n := range names {
			classOf(n)
		}
	}
}
