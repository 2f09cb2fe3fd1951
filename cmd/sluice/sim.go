package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"strings"

	"sluice/bench/sim"
)

const simExamples = `
Examples:
  sluice sim                                    one engine on a free port
  sluice sim --role prefill & sluice sim --role decode &
      two engines side by side, ready for: sluice serve --prefill URL --decode URL
  sluice sim --ranks 4 --kv-events tcp://127.0.0.1:5557 --speed 10
  sluice sim --fault kind=reset,after=5,p=0.1   one stream in ten is reset after five chunks

The first line on standard output is the address it listens on.
`

// runSim runs one simulated engine until ctx ends.
func runSim(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	var o sim.Options
	fs := flag.NewFlagSet("sluice sim", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o.Flags(fs)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), "Usage: sluice sim [flags]\n\nA simulated engine: real HTTP, real KV events, output that is a function of\nmodel, token ids and seed.\n\nFlags:\n")
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), simExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	e, err := sim.Start(ctx, o)
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	fmt.Fprintln(stdout, strings.TrimPrefix(e.URL(), "http://"))
	fmt.Fprintf(stderr, "sim: %s %s engine, model %q\n", o.Engine, o.Role, o.Model)
	for i, u := range e.KVEndpoints() {
		fmt.Fprintf(stderr, "sim: rank %d publishes KV events at %s\n", i, u)
	}
	dead := false
	select {
	case <-ctx.Done():
	case <-e.Dead(): // it crashed and will not come back: so does its process
		dead = true
	}
	if err := e.Close(); err != nil {
		fmt.Fprintln(stderr, "sluice sim:", err)
		return 1
	}
	if dead {
		fmt.Fprintln(stderr, "sluice sim: the engine crashed")
		return 1
	}
	return 0
}
