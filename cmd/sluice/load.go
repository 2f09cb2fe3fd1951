package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"

	"sluice/bench/load"
)

const loadExamples = `
Examples:
  sluice load --url http://127.0.0.1:8080 --concurrency 32 --duration 30s
      closed loop: 32 users, each with one request at a time
  sluice load --rate 50 --poisson --turns 4 --shared-prefix 0.8
      open loop: 50 requests a second, conversations of four turns with common prefixes
  sluice load --trace trace.jsonl --trace-speed 10 --duration 5m --json
      replay {timestamp, input_length, output_length, hash_ids} lines ten times as fast
`

// runLoad sends load and prints the latencies and failures that a client sees.
func runLoad(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o := load.Default()
	fs := flag.NewFlagSet("sluice load", flag.ContinueOnError)
	fs.SetOutput(stderr)
	o.Flags(fs)
	asJSON := fs.Bool("json", false, "print the report as JSON")
	quiet := fs.Bool("quiet", false, "no progress on standard error")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), "Usage: sluice load [flags]\n\nFlags:\n")
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), loadExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	var progress func(load.Snapshot)
	if !*quiet {
		progress = func(s load.Snapshot) {
			fmt.Fprintf(stderr, "\r%6s  %s ok  %s failed  %d in flight  first token p50 %s p99 %s   ", s.Elapsed.Round(time.Second),
				humanize.Comma(s.OK), humanize.Comma(s.Failed), s.InFlight, s.TTFT50.Round(10*time.Microsecond), s.TTFT99.Round(10*time.Microsecond))
		}
	}
	rep, err := load.Run(ctx, o, progress)
	if !*quiet {
		fmt.Fprintln(stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	if *asJSON {
		err = rep.WriteJSON(stdout)
	} else {
		err = rep.WriteTable(stdout)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice load:", err)
		return 1
	}
	if rep.OK == 0 {
		return 1
	}
	return 0
}
