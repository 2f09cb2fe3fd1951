package front

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"

	"sluice/dataplane/compression"
)

// randomChat is a chat request of about n bytes, with a member that StripForbidden removes.
func randomChat(rng *rand.Rand, n int) []byte {
	var text strings.Builder
	for text.Len() < n {
		if rng.IntN(3) == 0 {
			text.WriteString(strings.Repeat("again and again ", rng.IntN(200)))
		}
		fmt.Fprintf(&text, "%x é ", rng.Uint64())
	}
	quoted, _ := json.Marshal(text.String()[:max(0, min(n, text.Len()))])
	if rng.IntN(2) == 0 {
		return fmt.Appendf(nil, `{"model":"m","messages":[{"role":"user","content":%s}],"n":1}`, quoted)
	}
	return fmt.Appendf(nil, `{"model":"m", "kv_transfer_params": {"remote_host":"a"} ,"messages":[{"role":"user","content":%s}]}`, quoted)
}

// TestBodiesByteForByte sends bodies of random sizes in every framing and coding, cut at random
// places, with pooled buffers that were used before. It compares every byte that the handler
// gets with the bytes sent or, if a member was removed, with the result of encoding/json. The
// response repeats the body and is compared too, compressed or not.
func TestBodiesByteForByte(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 7))
	got := make(chan []byte, 1)
	r := start(t, Options{StripForbidden: true, CompressMin: 2 << 10}, func(x Exchange) {
		got <- bytes.Clone(x.Request().Doc.Body)
		x.ReplyJSON(200, x.Request().Doc.Body)
	})
	sizes := []int{0, 100, 4 << 10, 11_900, 12_100, 12_288, 13_000, 16 << 10, 32 << 10, 49_152, 100_000, 200_000, 900_000, 1_100_000, 3 << 20}
	for i := range 150 {
		body := randomChat(rng, sizes[i%len(sizes)]+rng.IntN(64))
		encoding := compression.Algorithm(rng.IntN(3))
		sent := encoding.Append(nil, body)
		head := "POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
		if encoding != compression.Identity {
			head += "Content-Encoding: " + encoding.String() + "\r\n"
		}
		answered := compression.Algorithm(rng.IntN(3))
		if answered != compression.Identity {
			head += "Accept-Encoding: " + answered.String() + "\r\n"
		}
		if rng.IntN(2) == 0 {
			head += "Transfer-Encoding: chunked\r\n"
			var framed bytes.Buffer
			for rest := sent; len(rest) > 0; {
				n := min(len(rest), 1+rng.IntN(1+rng.IntN(40_000)))
				fmt.Fprintf(&framed, "%x\r\n%s\r\n", n, rest[:n])
				rest = rest[n:]
			}
			framed.WriteString("0\r\n\r\n")
			sent = framed.Bytes()
		} else {
			head += fmt.Sprintf("Content-Length: %d\r\n", len(sent))
		}
		what := fmt.Sprintf("body %d: %d bytes as %v, %d on the wire", i, len(body), encoding, len(sent))
		nc, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = nc.SetDeadline(time.Now().Add(20 * time.Second))
		go func(all []byte, cuts int) {
			for ; len(all) > 0 && cuts > 0; cuts-- {
				n := 1 + len(all)/2*cuts/(cuts+1)
				if _, err := nc.Write(all[:n]); err != nil {
					return
				}
				all = all[n:]
			}
			_, _ = nc.Write(all)
		}(append([]byte(head+"\r\n"), sent...), rng.IntN(6))
		resp, err := http.ReadResponse(bufio.NewReader(nc), nil)
		if err != nil || resp.StatusCode != 200 {
			t.Fatalf("%s: %v %v", what, resp, err)
		}
		seen := <-got
		if !bytes.Contains(body, []byte("kv_transfer_params")) {
			if !bytes.Equal(seen, body) {
				t.Fatalf("%s: the handler got other bytes", what)
			}
		} else if want, have := marshalObject(t, body), marshalObject(t, seen); true {
			delete(want, "kv_transfer_params")
			if !reflect.DeepEqual(have, want) {
				t.Fatalf("%s: another object without its member", what)
			}
		}
		if _, answer := decodedOf(t, resp); answer != string(seen) {
			t.Fatalf("%s: the answer has other bytes", what)
		}
		nc.Close()
	}
}

func marshalObject(t *testing.T, b []byte) (object map[string]any) {
	t.Helper()
	if err := json.Unmarshal(b, &object); err != nil {
		t.Fatalf("%v in %.200q", err, b)
	}
	return object
}
