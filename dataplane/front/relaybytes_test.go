package front

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// span is a part of an engine's response. The value of a private member is a span of its own.
type span struct {
	text    string
	private bool
}

func joined(spans []span) string {
	var all strings.Builder
	for _, s := range spans {
		all.WriteString(s.text)
	}
	return all.String()
}

// redactedForms matches the text that the relay writes instead of a private value.
var redactedForms = regexp.MustCompile(`^(null|\{ *\}|\[ *\]|" *"|0) *$`)

// firstDifference describes the first difference between got and spans with redacted private values.
// It returns "" if there is none.
func firstDifference(spans []span, got string) string {
	at := 0
	for i, s := range spans {
		piece := got[at:min(at+len(s.text), len(got))]
		switch {
		case len(piece) < len(s.text):
			return fmt.Sprintf("the answer ends in span %d, at byte %d", i, at+len(piece))
		case s.private && !redactedForms.MatchString(piece):
			return fmt.Sprintf("byte %d: the private value %.80q became %.80q", at, s.text, piece)
		case !s.private && piece != s.text:
			n := 0
			for piece[n] == s.text[n] {
				n++
			}
			return fmt.Sprintf("byte %d: %.80q, sent %.80q", at+n, piece[n:], s.text[n:])
		}
		at += len(s.text)
	}
	if at < len(got) {
		return fmt.Sprintf("%d bytes behind the answer: %.80q", len(got)-at, got[at:])
	}
	return ""
}

// randomText returns the inside of a JSON string of about n bytes. It begins with tag, and contains
// text that looks like a private member.
func randomText(rng *rand.Rand, tag string, n int) string {
	var text strings.Builder
	for text.WriteString(tag); text.Len() < n; {
		switch rng.IntN(6) {
		case 0:
			text.WriteString(`\"kv_transfer_params\":{\"a\":1},`)
		case 1:
			text.WriteString(strings.Repeat("again and again ", rng.IntN(1+n/40)))
		case 2:
			text.WriteString(`é\n\u00e9\\ 漢字 [{]}`)
		default:
			fmt.Fprintf(&text, "%s %x ", tag, rng.Uint64())
		}
	}
	return text.String()
}

// privateValue returns a value of a random JSON kind that no client may see.
func privateValue(rng *rand.Rand, tag string) string {
	s := strconv.Quote("secret " + tag + strings.Repeat(" }]\\\",", rng.IntN(40)))
	switch rng.IntN(5) {
	case 0:
		return s
	case 1:
		return strconv.Itoa(70707 + rng.IntN(1<<40))
	case 2:
		return `[` + s + `,{"a":[1]},70707]`
	case 3:
		return `{"remote_host":` + s + `,"remote_block_ids":[[` + strings.Repeat("70707,", rng.IntN(3000)) + `1]],"n":{"a":[]}}`
	default:
		return `{ "remote_host" : ` + s + ` }`
	}
}

// randomObject returns an object with any number of private members at random places.
func randomObject(rng *rand.Rand, tag string, size int, private bool) []span {
	spans := []span{{text: `{"id":"` + tag + `"`}}
	add := func(text string) { spans = append(spans, span{text: text}) }
	secret := func() {
		if private && rng.IntN(2) == 0 {
			names := []string{"kv_transfer_params", "ec_transfer_params", "disaggregated_params", `kv_transfer_param\u0073`}
			add(`,"` + names[rng.IntN(len(names))] + `":` + strings.Repeat(" ", rng.IntN(3)))
			spans = append(spans, span{privateValue(rng, tag), true})
		}
	}
	secret()
	add(`,"choices":[{"index":0`)
	secret()
	add(`,"delta":{"content":"` + randomText(rng, tag, size) + `"`)
	secret()
	add(`}}]`)
	secret()
	add(`,"usage": null }`)
	return spans
}

// randomAnswer returns a stream of events, or one object.
func randomAnswer(rng *rand.Rand, tag string, stream bool) []span {
	private := rng.IntN(2) == 0
	if !stream {
		sizes := []int{0, 900, 4 << 10, 16 << 10, 40 << 10, 200 << 10, 1 << 20}
		return randomObject(rng, tag, sizes[rng.IntN(len(sizes))]+rng.IntN(64), private)
	}
	var spans []span
	end := []string{"\n\n", "\r\n\r\n"}[rng.IntN(2)]
	for range 1 + rng.IntN(40) {
		size := rng.IntN(100)
		if rng.IntN(12) == 0 {
			size = []int{1 << 10, 8 << 10, 33 << 10, 140 << 10}[rng.IntN(4)] + rng.IntN(64)
		}
		if rng.IntN(8) == 0 {
			spans = append(spans, span{text: ": " + tag + end})
		}
		spans = append(spans, span{text: "data: "})
		spans = append(spans, randomObject(rng, tag, size, private)...)
		spans = append(spans, span{text: end})
	}
	return append(spans, span{text: "data: [DONE]" + end})
}

// written returns a response as an engine sends it, with random framing, in pieces of random size.
func written(rng *rand.Rand, body string, stream bool) (pieces []string, keep bool) {
	var all strings.Builder
	kind := "application/json"
	if stream {
		kind = "text/event-stream"
	}
	all.WriteString("HTTP/1.1 200 OK\r\nContent-Type: " + kind + "\r\n")
	keep = true
	switch rng.IntN(5) {
	case 0:
		fmt.Fprintf(&all, "Content-Length: %d\r\n\r\n%s", len(body), body)
	case 1:
		all.WriteString("Connection: close\r\n\r\n" + body)
		keep = false
	default:
		all.WriteString("Transfer-Encoding: chunked\r\n\r\n")
		most := 1 + rng.IntN(1<<(4+rng.IntN(13)))
		if len(body) > 100_000 {
			most += 4 << 10
		}
		for rest := body; rest != ""; {
			n := min(len(rest), 1+rng.IntN(most))
			all.WriteString(chunk(rest[:n]))
			rest = rest[n:]
		}
		all.WriteString("0\r\n\r\n")
	}
	rest := all.String()
	for cuts := rng.IntN(40); cuts > 0 && len(rest) > 1; cuts-- {
		n := 1 + rng.IntN(min(len(rest)-1, 1+2*len(rest)/cuts))
		pieces = append(pieces, rest[:n])
		rest = rest[n:]
	}
	return append(pieces, rest), keep
}

// trials is n, or 20 times as many with SLUICE_SOAK=1.
func trials(n int) int {
	if os.Getenv("SLUICE_SOAK") != "" {
		return 20 * n
	}
	return n
}

// TestRelayByteForByte relays random streams and non-streaming responses, several at a time over the
// same pooled buffers. It compares every byte that a client decodes with those that its engine
// sent, with redacted private values.
func TestRelayByteForByte(t *testing.T) { withBothRelayModes(t, testRelayByteForByte) }

func testRelayByteForByte(t *testing.T, by RelayMode) {
	type answer struct {
		pieces []string
		keep   bool
		pauses int64
	}
	var answers sync.Map // by the request's body
	e := startEngine(t, func(nc net.Conn, req *http.Request) bool {
		body, _ := io.ReadAll(req.Body)
		got, _ := answers.Load(string(body))
		a := got.(answer)
		rng := rand.New(rand.NewPCG(uint64(a.pauses), 1))
		for _, piece := range a.pieces {
			if _, err := io.WriteString(nc, piece); err != nil {
				return false
			}
			if rng.IntN(3) == 0 { // so that the next piece arrives in another read
				testwait.Pace(time.Duration(rng.IntN(300)) * time.Microsecond)
			}
		}
		return a.keep
	})
	r := start(t, Options{RelayMode: by, CompressMin: 1 << 10}, relayTo(e, func() RelayHooks { return RelayHooks{Handler: streamHooks{}} }))
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rng := rand.New(rand.NewPCG(11, uint64(worker)))
			for i := range trials(60) {
				stream := rng.IntN(3) > 0
				tag := fmt.Sprintf("w%di%d", worker, i)
				spans := randomAnswer(rng, tag, stream)
				sent := joined(spans)
				pieces, keep := written(rng, sent, stream)
				ask := fmt.Sprintf(`{"model":"m","stream":%v,"user":%q}`, stream, tag)
				answers.Store(ask, answer{pieces, keep, int64(i)})
				accept := []string{"", "gzip", "zstd"}[rng.IntN(3)]
				got, how, err := r.fetch(t, ask, accept)
				answers.Delete(ask)
				what := fmt.Sprintf("%s: %d bytes, stream %v, coding %q", tag, len(sent), stream, how)
				if err != nil {
					t.Errorf("%s: %v", what, err)
					return
				}
				if diff := firstDifference(spans, got); diff != "" {
					t.Errorf("%s: %s", what, diff)
					return
				}
				if !stream && !json.Valid([]byte(got)) {
					t.Errorf("%s: no JSON", what)
					return
				}
				if compressed := how != ""; compressed && (stream || how != accept) || accept != "" && !compressed && !stream && len(sent) > 64<<10 {
					t.Errorf("%s: asked for %q", what, accept)
				}
			}
		}()
	}
	wg.Wait()
}

// fetch posts body on a new connection, and returns the response's decoded body and its
// Content-Encoding.
func (r *testServer) fetch(t *testing.T, body, accept string) (got, how string, err error) {
	nc, err := net.Dial("tcp", r.addr)
	if err != nil {
		return "", "", err
	}
	defer nc.Close()
	_ = nc.SetDeadline(time.Now().Add(testTimeout))
	if _, err = io.WriteString(nc, chatPost(body, "Accept-Encoding: "+accept)); err != nil {
		return "", "", err
	}
	resp, err := http.ReadResponse(newClient(t, nc).br, nil)
	if err != nil || resp.StatusCode != 200 {
		return "", "", fmt.Errorf("%v, %v", resp, err)
	}
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		return "", "", fmt.Errorf("after %d bytes: %w", len(raw), err)
	}
	how = resp.Header.Get("Content-Encoding")
	resp.Body = io.NopCloser(bytes.NewReader(raw))
	_, got = decodedOf(t, resp)
	return got, how, nil
}
