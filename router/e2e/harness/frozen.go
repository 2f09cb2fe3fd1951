package harness

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"
)

// PendingRequest is a request in progress.
type PendingRequest struct {
	Id     string
	First  chan struct{} // closed once a stream has delivered its first tokens
	done   chan struct{}
	answer *Answer
	err    error
}

// StartPending sends a chat request for n tokens and does not wait for the response.
func StartPending(url, id string, stream bool, n int) *PendingRequest {
	c := &PendingRequest{Id: id, First: make(chan struct{}), done: make(chan struct{})}
	body := fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"go on and on, %s"}],"ignore_eos":true,"max_tokens":%d,"stream":%v}`, id, n, stream)
	go func() {
		defer close(c.done)
		req, err := http.NewRequest("POST", url+"/v1/chat/completions", strings.NewReader(body))
		if err != nil {
			c.err = err
			return
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("X-Request-Id", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			c.err = err
			return
		}
		defer resp.Body.Close()
		c.answer = &Answer{Status: resp.StatusCode, Header: resp.Header}
		r := bufio.NewReader(resp.Body)
		for n := 0; ; n++ {
			line, err := r.ReadBytes('\n')
			c.answer.Body = append(c.answer.Body, line...)
			if n == 8 { // after the role event and some tokens
				close(c.First)
			}
			if err != nil {
				if err != io.EOF {
					c.err = err
				}
				return
			}
		}
	}()
	return c
}

// Wait returns the response. It fails the test if the request does not end within the limit.
func (c *PendingRequest) Wait(t *testing.T, within time.Duration) *Answer {
	t.Helper()
	select {
	case <-c.done:
	case <-time.After(within):
		t.Fatalf("%s has no whole answer within %s", c.Id, within)
	}
	if c.err != nil {
		t.Fatalf("%s: %v", c.Id, c.err)
	}
	return c.answer
}
