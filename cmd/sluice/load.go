package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"sluice/bench/load"
)

const loadLong = `Sends load to an OpenAI-compatible server and prints the latencies and failures that a client
sees: a closed loop (--concurrency), an open loop (--rate), or a trace (--trace).`

const loadExamples = `
  sluice load --url http://127.0.0.1:8080 --concurrency 32 --duration 30s
      closed loop: 32 users, each with one request at a time
  sluice load --rate 50 --poisson --turns 4 --shared-prefix 0.8
      open loop: 50 requests a second, conversations of four turns with common prefixes
  sluice load --trace trace.jsonl --trace-speed 10 --duration 5m --json
      replay {timestamp, input_length, output_length, hash_ids} lines ten times as fast`

func loadCommand() *cobra.Command {
	o := load.Default()
	fs := flag.NewFlagSet("sluice load", flag.ContinueOnError)
	o.Flags(fs)
	var asJSON, quiet bool
	cmd := newCommand(cobra.Command{
		Use: "load [flags]", GroupID: groupTest, Short: "send load and print latencies", Long: loadLong, Example: loadExamples,
	}, "0 a request succeeded, 1 none did", func(cmd *cobra.Command, _ []string) int {
		return runLoad(cmd.Context(), o, asJSON, quiet, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the report as JSON")
	cmd.Flags().BoolVar(&quiet, "quiet", false, "print no progress on standard error")
	completeFlag(cmd, "endpoint", "chat", "completions", "generate")
	return cmd
}

// runLoad sends load and prints the latencies and failures that a client sees.
func runLoad(ctx context.Context, o load.Options, asJSON, quiet bool, stdout, stderr io.Writer) int {
	var progress func(load.Snapshot)
	if !quiet {
		progress = func(s load.Snapshot) {
			fmt.Fprintf(stderr, "\r%6s  %s ok  %s failed  %d in flight  first token p50 %s p99 %s   ", s.Elapsed.Round(time.Second),
				humanize.Comma(s.OK), humanize.Comma(s.Failed), s.InFlight, s.TTFT50.Round(10*time.Microsecond), s.TTFT99.Round(10*time.Microsecond))
		}
	}
	rep, err := load.Run(ctx, o, progress)
	if !quiet {
		fmt.Fprintln(stderr)
	}
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	if asJSON {
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
