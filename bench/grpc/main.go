// Command grpc is what the router as an engine is measured against: the same items
// from the same engine over a plain gRPC stream, with a server that forwards to one
// engine and chooses nothing, and the load for it. It is a module of its own, so that
// gRPC is not a dependency of the router. scripts/bench_engineapi.py builds and starts it.
//
//	grpc serve --engine http://127.0.0.1:8000 [--scan]     prints its address
//	grpc load --target 127.0.0.1:9000 --streams 200 …      prints one line of JSON
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"sluice/bench/grpc/items"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "usage: grpc serve|load [flags]")
		os.Exit(2)
	}
	fs := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	var err error
	switch os.Args[1] {
	case "serve":
		listen := fs.String("listen", "127.0.0.1:0", "address, or unix:PATH")
		engine := fs.String("engine", "", "base URL of the engine")
		scan := fs.Bool("scan", false, "find the token ids by a search, in place of encoding/json")
		_ = fs.Parse(os.Args[2:])
		err = serve(*listen, *engine, *scan)
	case "load":
		var o options
		fs.StringVar(&o.target, "target", "", "HOST:PORT or unix:PATH")
		fs.IntVar(&o.streams, "streams", 200, "users, each with one request at a time, on one connection")
		fs.IntVar(&o.tokens, "tokens", 200, "tokens of an answer")
		fs.IntVar(&o.prompt, "prompt", 64, "tokens of a prompt")
		fs.DurationVar(&o.duration, "duration", 4*time.Second, "how long requests are begun")
		_ = fs.Parse(os.Args[2:])
		err = load(&o)
	default:
		err = fmt.Errorf("grpc: cannot %q; want serve or load", os.Args[1])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(listen, engine string, scan bool) error {
	network, addr := "tcp", listen
	if len(listen) > 5 && listen[:5] == "unix:" {
		network, addr = "unix", listen[5:]
	}
	ln, err := net.Listen(network, addr)
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.MaxConcurrentStreams(1 << 20))
	items.RegisterEngineServer(s, newRelay(engine, scan))
	fmt.Println(ln.Addr())
	return s.Serve(ln)
}

// options of a closed loop of users.
type options struct {
	target                  string
	streams, tokens, prompt int
	duration                time.Duration
}

// report is that of bench/engineapi.
type report struct {
	Requests, Items, Tokens, Failed int64
	Error                           string `json:",omitempty"`
	Seconds                         float64
}

func load(o *options) error {
	conn, err := grpc.NewClient(o.target, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	defer conn.Close()
	engine := items.NewEngineClient(conn)
	var rep report
	var first sync.Once
	var wg sync.WaitGroup
	began := time.Now()
	for i := range o.streams {
		wg.Go(func() {
			prompt := make([]uint32, max(o.prompt, 1))
			for k := range prompt {
				prompt[k] = uint32(300 + (k*7+i*131)%900)
			}
			for n := 0; time.Since(began) < o.duration; n++ {
				prompt[0] = uint32(300 + n%900)
				got, tokens, err := ask(engine, prompt, o.tokens)
				atomic.AddInt64(&rep.Requests, 1)
				atomic.AddInt64(&rep.Items, int64(got))
				atomic.AddInt64(&rep.Tokens, int64(tokens))
				if err != nil {
					atomic.AddInt64(&rep.Failed, 1)
					first.Do(func() { rep.Error = err.Error() })
					time.Sleep(50 * time.Millisecond)
				}
			}
		})
	}
	wg.Wait()
	rep.Seconds = time.Since(began).Seconds()
	return json.NewEncoder(os.Stdout).Encode(&rep)
}

func ask(engine items.EngineClient, prompt []uint32, most int) (got, tokens int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	stream, err := engine.Generate(ctx, &items.Request{Model: "sim", TokenIds: prompt, MaxTokens: uint32(most)})
	if err != nil {
		return 0, 0, err
	}
	for finished := false; ; {
		it, err := stream.Recv()
		switch {
		case err != nil && finished && tokens == most:
			return got, tokens, nil
		case err != nil:
			return got, tokens, fmt.Errorf("%d of %d tokens: %w", tokens, most, err)
		}
		got++
		tokens += len(it.TokenIds)
		finished = finished || it.FinishReason != ""
	}
}
