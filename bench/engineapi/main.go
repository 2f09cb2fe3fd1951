// Command engineapi loads the engine API of a router and counts the responses: over the
// framed socket (unix, TCP) through the Go client, or over HTTP, whose events it parses
// only as far as it must. It prints one line of JSON. scripts/bench_engineapi.py starts
// it.
//
// "engineapi floor" runs in place of the router and does only what the sockets need; see
// socketBaseline.
//
//	engineapi --target unix:///run/engine.sock --streams 200 --tokens 200 --duration 4s
//	engineapi --target http://127.0.0.1:8080/v1/completions …
//	engineapi floor --listen unix:/run/floor.sock --frames --engine 127.0.0.1:8000 --body '{…}'
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// options of a run: a closed loop of users, each with one request at a time.
type options struct {
	target   string
	streams  int
	tokens   int
	prompt   int
	requests int
	duration time.Duration
	timeout  time.Duration
}

// answer is the result of one request.
type answer struct{ items, tokens int }

// user sends requests one after the other, each with another prompt.
type user interface {
	request(ctx context.Context, prompt []uint32) (answer, error)
	close()
}

// report is printed as JSON.
type report struct {
	Requests, Items, Tokens, Failed int64
	Error                           string  `json:",omitempty"` // error of the first failed request
	Seconds                         float64 // until the last response was complete
	AllocsPerItem                   float64 // of this process
}

func main() {
	if len(os.Args) > 1 && os.Args[1] == "floor" {
		if err := runSocketBaseline(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	var o options
	flag.StringVar(&o.target, "target", "", "unix:///PATH, tcp://HOST:PORT, or http://HOST:PORT and one of /v1/completions, /v1/engine/generate")
	flag.IntVar(&o.streams, "streams", 200, "users, each with one request at a time")
	flag.IntVar(&o.tokens, "tokens", 200, "tokens of an answer")
	flag.IntVar(&o.prompt, "prompt", 64, "tokens of a prompt")
	flag.IntVar(&o.requests, "requests", 0, "stop after this number of requests; 0: at the end of the duration")
	flag.DurationVar(&o.duration, "duration", 4*time.Second, "how long requests are begun")
	flag.DurationVar(&o.timeout, "timeout", time.Minute, "of one request")
	flag.Parse()
	rep, err := run(&o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(rep)
}

func run(o *options) (*report, error) {
	make, err := users(o)
	if err != nil {
		return nil, err
	}
	var rep report
	var first sync.Once
	var begun atomic.Int64
	var mu sync.Mutex
	var wg sync.WaitGroup
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	began := time.Now()
	for i := range o.streams {
		wg.Go(func() {
			u, err := make()
			if err != nil {
				first.Do(func() { rep.Error = err.Error() })
				atomic.AddInt64(&rep.Failed, 1)
				return
			}
			defer u.close()
			prompt := prompts(o.prompt, i)
			for n := 0; time.Since(began) < o.duration && (o.requests == 0 || begun.Add(1) <= int64(o.requests)); n++ {
				prompt[0] = uint32(300 + n%900) // every prompt differs
				ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
				a, err := u.request(ctx, prompt)
				cancel()
				if err == nil && a.tokens != o.tokens {
					err = fmt.Errorf("%d tokens came, %d were asked for", a.tokens, o.tokens)
				}
				mu.Lock()
				rep.Items, rep.Tokens = rep.Items+int64(a.items), rep.Tokens+int64(a.tokens)
				if rep.Requests++; err != nil {
					rep.Failed++
					first.Do(func() { rep.Error = err.Error() })
				}
				mu.Unlock()
				if err != nil {
					time.Sleep(50 * time.Millisecond) // avoids a busy loop when the server is down
				}
			}
		})
	}
	wg.Wait()
	rep.Seconds = time.Since(began).Seconds()
	runtime.ReadMemStats(&after)
	if rep.Items > 0 {
		rep.AllocsPerItem = float64(after.Mallocs-before.Mallocs) / float64(rep.Items)
	}
	return &rep, nil
}

// prompts returns a prompt of n ids of the simulated engine's vocabulary.
func prompts(n, user int) []uint32 {
	list := make([]uint32, max(n, 1))
	for i := range list {
		list[i] = uint32(300 + (i*7+user*131)%900)
	}
	return list
}

// users returns a function that makes one user after the other.
func users(o *options) (func() (user, error), error) {
	if strings.HasPrefix(o.target, "http://") {
		return httpUsers(o)
	}
	return socketUsers(o)
}
