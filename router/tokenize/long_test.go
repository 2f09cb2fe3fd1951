package tokenize

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"runtime"
	"strings"
	"testing"

	"sluice/dataplane/jsonscan"
	"sluice/dataplane/upstream"
)

// cannedEngine answers every request with the same bytes, and allocates next to nothing.
func cannedEngine(t testing.TB, answer []byte) *upstream.Endpoint {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer nc.Close()
				in := bufio.NewReaderSize(nc, 64<<10)
				for {
					req, err := http.ReadRequest(in)
					if err != nil {
						return
					}
					if _, err := in.Discard(int(req.ContentLength)); err != nil {
						return
					}
					if _, err := nc.Write(answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	ep, err := upstream.NewEndpoint("http://"+ln.Addr().String(), upstream.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ep.Close)
	return ep
}

// lookUps is a prompt of so many bytes, which each look-up requests again, and the engine's ids
// of it.
func lookUps(t testing.TB, size int) (ids []uint32, once func(i int) *Prompt) {
	t.Helper()
	ids = make([]uint32, size/4)
	for i := range ids {
		ids[i] = uint32(1000 + i*7919%127000)
	}
	body := fmt.Appendf(nil, `{"count":%d,"max_model_len":131072,"tokens":%s,"token_strs":null}`, len(ids), jsonscan.AppendTokenIDs(nil, ids))
	answer := fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
	ep := cannedEngine(t, answer)
	tk := New(Options{Timeout: patient.Timeout, MaxEngineBytes: 4 << 20})
	request := []byte(`{"model":"m","prompt":"00000000` + strings.Repeat("words ", size/6) + `"}`)
	at := strings.Index(string(request), "00000000")
	doc, p, call := new(jsonscan.Doc), new(Prompt), new(upstream.Call)
	return ids, func(i int) *Prompt {
		copy(request[at:], fmt.Sprintf("%08d", i))
		if err := doc.Scan(request, jsonscan.Limits{}); err != nil {
			t.Fatal(err)
		}
		*call = upstream.Call{}
		tk.Prompt(p, Completion, doc, ep, call)
		return p
	}
}

// A look-up of a long prompt allocates the ids that the cache keeps, once, and nothing else
// that grows with the prompt: not the answer, nor room that is too small at first.
func TestLongAnswerIsReadIntoCallerBuffer(t *testing.T) {
	if raceEnabled {
		t.Skip("the race detector empties pools at random")
	}
	for _, size := range []int{64 << 10, 1 << 20} {
		ids, once := lookUps(t, size)
		for i := range 3 {
			if p := once(i); p.Source != FromEngine || len(p.Tokens) != len(ids) {
				t.Fatalf("%d bytes: %v, %d ids, %s; want %d ids of the engine", size, p.Source, len(p.Tokens), p.Err, len(ids))
			}
		}
		const n = 10
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		for i := range n {
			once(100 + i)
		}
		runtime.ReadMemStats(&after)
		took, most := int(after.TotalAlloc-before.TotalAlloc)/n, 4*len(ids)+64<<10
		t.Logf("a prompt of %d bytes, %d ids: %d bytes allocated for a look-up", size, len(ids), took)
		if took > most {
			t.Errorf("%d bytes allocated for a look-up of %d ids, want at most %d", took, len(ids), most)
		}
	}
}

func BenchmarkLookUp(b *testing.B) {
	for _, kb := range []int{1, 16, 64, 256, 1000} {
		b.Run(fmt.Sprintf("%dKB", kb), func(b *testing.B) {
			_, once := lookUps(b, kb*1000)
			b.SetBytes(int64(kb * 1000))
			b.ReportAllocs()
			for i := range b.N {
				if p := once(i); p.Source != FromEngine {
					b.Fatal(p.Source, p.Err)
				}
			}
		})
	}
}
