package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"sluice/bench/load"
)

const loadLong = `Sends load to an OpenAI-compatible server and prints the latencies and failures that a client
sees: a closed loop (--concurrency), an open loop (--rate), a trace (--trace), or several sources at
once (--source), each with a load, a tenant, a class and targets of its own. The report of sources
has the answers within their targets (goodput), refusals, and the tokens computed for each tenant.

Keys of --source: name; a load: rate (requests a second, open loop), users (closed loop) or agents
(sessions of several turns, whose prompts grow by the answer and the result of a tool); class
(X-Sluice-Priority), tenant (X-Sluice-Tenant), key (an API key), priority (of the body); deadline,
ttft, tpot (targets); prompt, output (tokens), spread (sigma of their log-normal distribution),
groups, shared-prefix, turns (agents: MIN-MAX); for agents: pause (mean time of a tool), grow (mean
tokens of its result), start (interval in which the sessions begin).`

const loadExamples = `
  sluice load --url http://127.0.0.1:8080 --concurrency 32 --duration 30s
      closed loop: 32 users, each with one request at a time
  sluice load --rate 50 --poisson --turns 4 --shared-prefix 0.8
      open loop: 50 requests a second, conversations of four turns with common prefixes
  sluice load --trace trace.jsonl --trace-speed 10 --duration 5m --json
      replay {timestamp, input_length, output_length, hash_ids} lines ten times as fast
  sluice load --poisson --warmup 5s --duration 30s --cooldown 5s \
      --source tenant=a,class=high,rate=20,ttft=1s,tpot=50ms --source tenant=b,rate=80,ttft=5s
      two tenants with targets; what is due in the first and last 5 s is not counted
  sluice load --duration 1h --source agents=64,turns=20-60,prompt=1000,grow=200,output=40,spread=0.5,pause=1s
      64 sessions of agents that call tools`

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
	cmd.Flags().BoolVar(&quiet, "quiet", false, "print no progress on standard error; the default where that is not a terminal")
	completeFlag(cmd, "endpoint", "chat", "completions", "generate")
	return cmd
}

// runLoad sends load and prints the latencies and failures that a client sees.
func runLoad(ctx context.Context, o load.Options, asJSON, quiet bool, stdout, stderr io.Writer) int {
	var progress func(load.Snapshot)
	if screen, isFile := stderr.(*os.File); !isFile || !isatty(screen) {
		quiet = true // a line that is written over and over only fills a file
	}
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
