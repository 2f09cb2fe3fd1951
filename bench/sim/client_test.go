package sim

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"
)

func get(t testing.TB, url string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	resp, err := client.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b)
}

func (a answer) choice() map[string]any {
	list, _ := a.json["choices"].([]any)
	if len(list) == 0 {
		return nil
	}
	return list[0].(map[string]any)
}

func (a answer) text() string {
	s, _ := a.choice()["text"].(string)
	return s
}

// ids are the token ids of the first choice.
func (a answer) ids() []uint32 {
	var v struct {
		Choices []struct {
			IDs []uint32 `json:"token_ids"`
		} `json:"choices"`
	}
	json.Unmarshal(a.body, &v)
	if len(v.Choices) == 0 {
		return nil
	}
	return v.Choices[0].IDs
}

// handle is the kv_transfer_params of an answer as sent.
func (a answer) handle() string {
	var v struct {
		H json.RawMessage `json:"kv_transfer_params"`
	}
	json.Unmarshal(a.body, &v)
	return string(v.H)
}

// streamText joins the text of the first choice of an SSE body.
func streamText(body []byte) string {
	var b strings.Builder
	for _, ev := range strings.Split(string(body), "\n\n") {
		var v struct {
			Choices []struct {
				Index int    `json:"index"`
				Text  string `json:"text"`
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
			} `json:"choices"`
		}
		if json.Unmarshal([]byte(strings.TrimPrefix(ev, "data: ")), &v) == nil && len(v.Choices) > 0 && v.Choices[0].Index == 0 {
			b.WriteString(v.Choices[0].Text + v.Choices[0].Delta.Content)
		}
	}
	return b.String()
}

// request is a raw POST.
func request(path, body string, headers ...string) string {
	h := ""
	for _, x := range headers {
		h += x + "\r\n"
	}
	return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%s\r\n%s", path, len(body), h, body)
}

func dial(t testing.TB, addr string) net.Conn {
	t.Helper()
	c, err := net.DialTimeout("tcp", addr, 10*time.Second)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(60 * time.Second))
	return c
}

// rawExchange sends bytes and gives all that comes until the engine closes.
func rawExchange(t testing.TB, addr, send string) string {
	t.Helper()
	c := dial(t, addr)
	io.WriteString(c, send)
	b, err := io.ReadAll(c)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// openStream sends a streaming request and reads the head and n events.
func openStream(t testing.TB, addr, path, body string, n int, headers ...string) (net.Conn, *bufio.Reader) {
	t.Helper()
	c := dial(t, addr)
	io.WriteString(c, request(path, body, headers...))
	br := bufio.NewReader(c)
	for events, head := 0, true; head || events < n; {
		line, err := br.ReadString('\n')
		if err != nil {
			t.Fatalf("stream ended: %v", err)
		}
		if head && line == "\r\n" {
			head = false
		}
		if strings.HasPrefix(line, "data: ") || strings.HasPrefix(line, "event: ") {
			events++
		}
	}
	return c, br
}

func unchunk(t testing.TB, body string) (chunks []string) {
	t.Helper()
	for {
		size, rest, ok := strings.Cut(body, "\r\n")
		n, err := strconv.ParseInt(size, 16, 32)
		if !ok || err != nil {
			t.Fatalf("bad chunk head %q", size)
		}
		if n == 0 {
			if rest != "\r\n" {
				t.Fatalf("bytes after the last chunk: %q", rest)
			}
			return chunks
		}
		chunks = append(chunks, rest[:n])
		if rest[n:n+2] != "\r\n" {
			t.Fatalf("chunk of %d bytes ends in %q", n, rest[n:n+2])
		}
		body = rest[n+2:]
	}
}
