package obs

import (
	"bufio"
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// TestLogWithStalledReader: a log whose reader has stalled delays nobody; lines are dropped, and counted
// by the first line after that. All lines are whole.
func TestLogWithStalledReader(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	log, _, err := NewLogger(w, "info", "json")
	if err != nil {
		t.Fatal(err)
	}
	const lines = 5000
	before := DroppedLogLines()
	padding, logged := strings.Repeat("x", 100), make(chan struct{})
	go func() {
		defer close(logged)
		for range lines {
			log.Info("a line", "padding", padding)
		}
	}()
	testwait.Until(t, "the lines are written or dropped", func() bool {
		select {
		case <-logged:
			return true
		default:
			return false
		}
	})
	read := make(chan map[string]any, 2*lines)
	go func() {
		defer close(read)
		for s := bufio.NewScanner(r); s.Scan(); {
			v := map[string]any{}
			if err := json.Unmarshal(s.Bytes(), &v); err != nil {
				t.Errorf("%v: %q", err, s.Bytes())
			}
			read <- v
		}
	}()
	n := 1
	if first := <-read; first["msg"] != "a line" {
		t.Fatalf("the first line is %v", first)
	}
	testwait.Settled(t, 100*time.Millisecond, "the number of lines read", func() int { return len(read) })
	log.Info("the last")
	w.Close()
	var dropped float64
	var last any
	for v := range read {
		switch last = v["msg"]; last {
		case "a line":
			n++
		case "the last":
		default:
			dropped += v["lines"].(float64)
		}
	}
	if n := DroppedLogLines() - before; n < uint64(dropped) { // other tests may drop lines too
		t.Errorf("%d dropped lines are counted; want %v", n, dropped)
	}
	if last != "the last" || dropped == 0 || n+int(dropped) != lines {
		t.Errorf("%d lines read, %v dropped, of %d; the last is %v", n, dropped, lines, last)
	}
}

// TestLogKeepsLongLines: lines longer than a pipe writes at once are whole.
func TestLogKeepsLongLines(t *testing.T) {
	t.Parallel()
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	log, _, err := NewLogger(w, "info", "text")
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("y", 300<<10)
	go func() {
		log.Info(long)
		w.Close()
	}()
	s := bufio.NewReader(r)
	line, err := s.ReadString('\n')
	if err != nil || !strings.HasSuffix(line, "msg="+long+"\n") {
		t.Errorf("%d bytes, %v", len(line), err)
	}
}
