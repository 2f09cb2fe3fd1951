package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"sluice/bench/load"
	"sluice/bench/sim"
	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/obs"
	"sluice/router/worker"
)

const demoLong = `Starts two prefill and two decode engines (simulated, on free loopback ports), the router in front
of them, and a load of chat conversations; and a second set of the same with a round-robin router
and the same load. The console compares the two. Ctrl-C ends everything.`

const demoExamples = `
  sluice demo
  sluice demo --duration 20s          ends by itself with a summary
  sluice demo --pd sglang             SGLang engines with a bootstrap server
  sluice demo --rate 6 --listen 127.0.0.1:8080`

// demoOptions are the values of the demo's flags.
type demoOptions struct {
	duration time.Duration
	listen   string
	admin    string
	rate     float64
	pd       string
	asJSON   bool
}

// demoEngines configures the simulated engines for each hand-over family that --pd accepts.
var demoEngines = map[string]func(*sim.Options){
	"nixl":      func(*sim.Options) {},
	"nixl-push": func(o *sim.Options) { o.PD = "nixl-push" },
	"sglang":    func(o *sim.Options) { o.Engine = "sglang" },
	"mooncake":  func(o *sim.Options) { o.PD = "mooncake" },
}

func demoCommand() *cobra.Command {
	var o demoOptions
	cmd := newCommand(cobra.Command{
		Use: "demo [flags]", GroupID: groupRun, Short: "run simulated engines, a router, load and a console", Long: demoLong, Example: demoExamples,
	}, "0 ended, 1 failed", func(cmd *cobra.Command, _ []string) int {
		return runDemo(cmd.Context(), o, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	families := slices.Sorted(maps.Keys(demoEngines))
	fs := cmd.Flags()
	fs.DurationVar(&o.duration, "duration", 0, "end after this `TIME` (default: at Ctrl-C)")
	fs.StringVar(&o.listen, "listen", "127.0.0.1:0", "`ADDRESS` of the router; port 0 selects a free one")
	fs.StringVar(&o.admin, "admin", "127.0.0.1:0", "`ADDRESS` of the console")
	fs.Float64Var(&o.rate, "rate", 7, "requests a `SECOND`, to each of the two routers")
	fs.StringVar(&o.pd, "pd", "nixl", "hand-over `FAMILY` of the engines: "+strings.Join(families, ", "))
	fs.BoolVar(&o.asJSON, "json", false, "print the addresses, and at the end the summary, as a line of JSON each")
	completeFlag(cmd, "pd", families...)
	return cmd
}

// runDemo runs the demo until ctx or its duration ends.
func runDemo(ctx context.Context, o demoOptions, stdout, stderr io.Writer) int {
	if o.rate <= 0 || o.duration < 0 {
		fmt.Fprintf(stderr, "sluice demo: --rate %v, --duration %v; want more than 0, and 0 or more\n", o.rate, o.duration)
		return 2
	}
	if demoEngines[o.pd] == nil {
		fmt.Fprintf(stderr, "sluice demo: --pd %q; want one of %s\n", o.pd, strings.Join(slices.Sorted(maps.Keys(demoEngines)), ", "))
		return 2
	}
	if err := demo(ctx, o, stdout, stderr); err != nil {
		fmt.Fprintln(stderr, "sluice demo:", err)
		return 1
	}
	return 0
}

// demoSide is one of the two compared routers, with its engines and its load report.
type demoSide struct {
	name    string
	engines []*sim.Engine
	router  *app.Router
	report  *load.Report
}

func demo(ctx context.Context, o demoOptions, stdout, stderr io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	log, _, err := obs.NewLogger(stderr, "error", "text")
	if err != nil {
		return err
	}
	var sides [2]*demoSide // the round robin router first: the console of the other shows its figures
	defer func() {
		for _, s := range sides {
			s.close()
		}
	}()
	if sides[0], err = newSide("round robin", "round_robin", o.pd, "127.0.0.1:0", "off", nil, log); err != nil {
		return err
	}
	if sides[1], err = newSide("sluice", "kv", o.pd, o.listen, o.admin, sides[0].router, log); err != nil {
		return err
	}
	var routers sync.WaitGroup
	failed := make(chan error, len(sides))
	for _, s := range sides {
		routers.Go(func() {
			if err := s.router.Run(ctx); err != nil {
				failed <- err
				cancel()
			}
		})
	}
	defer routers.Wait()
	defer cancel()
	if err := awaitDemoReady(ctx, sides[:]); err != nil {
		return err
	}
	printIntro(stdout, sides[1].router, o.asJSON)

	loading, stop := context.WithCancel(ctx)
	defer stop()
	if o.duration > 0 {
		var end context.CancelFunc
		loading, end = context.WithTimeout(loading, o.duration)
		defer end()
	}
	var loads sync.WaitGroup
	for _, s := range sides {
		loads.Go(func() {
			rep, err := load.Run(loading, demoLoad(o, s.router), nil)
			if err != nil {
				failed <- err
				stop()
				return
			}
			s.report = rep
		})
	}
	loads.Wait()
	select {
	case err := <-failed:
		return err
	default:
	}
	return summary(stdout, sides[:], o.asJSON)
}

// newSide starts two prefill and two decode engines and a router over them.
func newSide(name, policy, pd, listen, adminAddr string, compared *app.Router, log *slog.Logger) (*demoSide, error) {
	s := &demoSide{name: name}
	cfg := config.Default()
	cfg.Listen, cfg.Admin.Listen, cfg.Schedule.Policy = listen, adminAddr, policy
	cfg.PD.Family = pd
	cfg.Timeouts.Drain = 2 * time.Second
	for _, role := range []worker.Role{worker.Prefill, worker.Prefill, worker.Decode, worker.Decode} {
		engine := sim.Options{
			Role: role.String(), Blocks: 7000, Records: -1,
			// Roughly a 30B model: the prefill of 3,000 tokens takes 0.25 s.
			Cost: sim.Cost{PerPrefill: 80 * time.Microsecond, Step: 10 * time.Millisecond, Handshake: 20 * time.Millisecond},
		}
		demoEngines[pd](&engine)
		e, err := sim.Start(context.Background(), engine)
		if err != nil {
			s.close()
			return nil, err
		}
		s.engines = append(s.engines, e)
		w := config.Worker{URL: e.URL(), Role: role, KVEvents: []string{"auto"}}
		if host, port := e.Bootstrap(); port > 0 {
			w.Options = map[string][]string{"bootstrap_host": {host}, "bootstrap_port": {strconv.Itoa(port)}}
		}
		cfg.Workers = append(cfg.Workers, w)
	}
	err := cfg.Validate()
	if err == nil {
		s.router, err = app.New(app.Options{Config: cfg, Log: log, Version: version, Compared: compared})
	}
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

func (s *demoSide) close() {
	if s == nil {
		return
	}
	if s.router != nil {
		s.router.Close()
	}
	for _, e := range s.engines {
		e.Close()
	}
}

func awaitDemoReady(ctx context.Context, sides []*demoSide) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for _, s := range sides {
		for {
			if len(s.router.NotReady()) == 0 {
				break
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
				return fmt.Errorf("the engines did not become ready: waiting for %v", s.router.NotReady())
			}
		}
	}
	return nil
}

// demoLoad returns the load: conversations of six turns with shared system prompts. KV-aware
// routing pays for such a load, because later turns reuse the blocks of earlier ones.
func demoLoad(o demoOptions, r *app.Router) load.Options {
	l := load.Default()
	l.URL = "http://" + r.Addr()
	l.Rate, l.Poisson = o.rate, true
	l.Duration = 24 * time.Hour
	if o.duration > 0 {
		l.Duration = o.duration
	}
	l.PromptTokens, l.OutputTokens, l.SharedPrefix, l.Groups, l.Turns = 1200, 48, 0.3, 16, 8
	return l
}

func printIntro(w io.Writer, r *app.Router, asJSON bool) {
	if asJSON {
		intro := struct {
			API     string `json:"api"`
			Console string `json:"console,omitempty"`
		}{API: "http://" + r.Addr() + "/v1"}
		if page := r.Components().Admin; page != nil {
			intro.Console = page.URL()
		}
		_ = json.NewEncoder(w).Encode(intro) // the demo runs even if nobody reads this
		return
	}
	fmt.Fprintf(w, "\n  Sluice is routing between 2 prefill and 2 decode engines (simulated).\n\n")
	if page := r.Components().Admin; page != nil {
		fmt.Fprintf(w, "  Page   %s\n", page.URL())
	}
	fmt.Fprintf(w, "  API    http://%s/v1\n\n", r.Addr())
	fmt.Fprintf(w, "  Try    curl -N http://%s/v1/chat/completions -H 'Content-Type: application/json' \\\n", r.Addr())
	fmt.Fprintf(w, "           -d '{\"model\":\"sim\",\"stream\":true,\"max_tokens\":32,\"messages\":[{\"role\":\"user\",\"content\":\"Hello\"}]}'\n\n")
	fmt.Fprintf(w, "  Ctrl-C ends everything.\n\n")
}

// summary prints the comparison of the two routers and returns an error if requests failed.
func summary(w io.Writer, sides []*demoSide, asJSON bool) error {
	show := printSummary
	if asJSON {
		show = printSummaryJSON
	}
	if err := show(w, sides); err != nil {
		return err
	}
	for _, s := range sides {
		if s.report == nil {
			continue
		}
		if s.report.OK == 0 || s.report.Failed > 0 {
			return fmt.Errorf("%s: %d requests went well, %d failed: %v", s.name, s.report.OK, s.report.Failed, s.report.Errors)
		}
	}
	return nil
}

// printSummaryJSON prints the reports of the two loads, and what the engines found in their caches.
func printSummaryJSON(w io.Writer, sides []*demoSide) error {
	type side struct {
		Router string       `json:"router"`
		Hits   float64      `json:"prompt_tokens_from_cache"` // share, as the prefill engines count
		Load   *load.Report `json:"load"`
	}
	var out []side
	for i := len(sides) - 1; i >= 0; i-- {
		if s := sides[i]; s.report != nil {
			out = append(out, side{s.name, prefillHits(s), s.report})
		}
	}
	return json.NewEncoder(w).Encode(map[string]any{"routers": out})
}

// printSummary prints the table.
func printSummary(w io.Writer, sides []*demoSide) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "router\trequests\tfailed\tfirst token p50\tp99\tend to end p50\tprompt tokens from cache\tpredicted\t")
	for i := len(sides) - 1; i >= 0; i-- {
		r := sides[i].report
		if r == nil {
			continue
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%.0f ms\t%.0f ms\t%.0f ms\t%s\t%s\t\n", sides[i].name, humanize.Comma(r.OK), humanize.Comma(r.Failed),
			r.TTFT.P50, r.TTFT.P99, r.Total.P50, percent(prefillHits(sides[i])), percent(float64(r.PredictedCachedTokens)/float64(max(1, r.PromptTokens))))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	kv, rr := sides[1].report, sides[0].report
	if kv != nil && rr != nil && kv.TTFT.P50 > 0 {
		fmt.Fprintf(w, "\nWith the same load and engines, the median time to first token of round robin was %.2f times as long.\n", rr.TTFT.P50/kv.TTFT.P50)
	}
	return nil
}

// prefillHits returns the share of prompt tokens that the prefill engines found in their
// caches, as counted by the engines.
func prefillHits(s *demoSide) float64 {
	queries, hits := 0, 0
	for i, e := range s.engines {
		if i < 2 {
			sum := e.Stats().Sum()
			queries += sum.PrefixQueries
			hits += sum.PrefixHits
		}
	}
	return float64(hits) / float64(max(1, queries))
}

func percent(share float64) string { return fmt.Sprintf("%.0f %%", 100*share) }
