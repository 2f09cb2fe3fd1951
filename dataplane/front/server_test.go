package front

import "testing"

func TestShortAnswer(t *testing.T) {
	r := start(t, Options{}, echo)
	c := r.dial()
	for range 3 {
		c.send(chatPost(`{"model":"m"}`))
		resp, body := c.answer()
		if resp.StatusCode != 200 || body != `{"model":"m"}` {
			t.Fatalf("%d %q", resp.StatusCode, body)
		}
		if resp.Header.Get("X-Request-Id") == "" {
			t.Error("no X-Request-Id")
		}
	}
}
