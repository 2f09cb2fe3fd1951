package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"sluice/router/app"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/worker"
)

const checkLong = `Checks the configuration that serve would use, made of file, environment and flags, and prints its
effect. It lists every error, with line and column if it is in the file, and then reads the files
that the configuration names, such as keys and certificates.`

const checkExample = `
  sluice check --config sluice.yaml
  sluice check --config sluice.yaml --probe      compare the engines with the configuration, too
  sluice check --engine http://127.0.0.1:8000    flags of serve instead of a file`

func checkCommand() *cobra.Command {
	fs := flag.NewFlagSet("sluice check", flag.ContinueOnError)
	flags := config.RegisterFlags(fs)
	var probe, asJSON bool
	var timeout time.Duration
	cmd := newCommand(cobra.Command{
		Use: "check [flags]", GroupID: groupConfigure, Short: "validate a configuration and print its effect", Long: checkLong, Example: checkExample,
		Annotations: map[string]string{notes: workerKeyNotes()},
	}, "0 valid, 1 invalid", func(cmd *cobra.Command, _ []string) int {
		stdout, stderr := cmd.OutOrStdout(), cmd.ErrOrStderr()
		if asJSON {
			return runCheckJSON(flags, probe, timeout, stdout, stderr)
		}
		return runCheck(flags, probe, timeout, stdout, stderr)
	})
	addGoFlags(cmd, fs)
	completeConfig(cmd)
	cmd.Flags().BoolVar(&probe, "probe", false, "also probe the engines, and fail unless each answers and matches the configuration")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "`DURATION` of each probe request to an engine")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print errors, warnings, effect and probed engines as JSON")
	return cmd
}

// runCheck validates a configuration and prints its effect. With probe it also compares the
// engines with the configuration.
func runCheck(flags *config.Flags, probe bool, timeout time.Duration, stdout, stderr io.Writer) int {
	cfg, err := flags.Resolve(os.Environ())
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	// Errors only: a page about a configuration that cannot start would look as if it could.
	faults := app.CheckStart(cfg)
	if len(faults) > 0 {
		for _, err := range faults {
			fmt.Fprintf(stderr, "sluice check: %v\n", err)
		}
		return 1
	}
	fmt.Fprint(stdout, cfg.Describe())
	busy, idle := removedWithin(cfg)
	fmt.Fprintf(stdout, "\na dead worker with requests is removed from the choice within %s; one without, within %s\n", busy, idle)
	if !probe {
		return 0
	}
	fmt.Fprintln(stdout, "\nengines probed:")
	servers, err := probeServers(cfg, timeout)
	if err != nil {
		fmt.Fprintf(stderr, "sluice check: %v\n", err)
		return 1
	}
	servers = append(servers, checkHandOvers(cfg)...)
	bad := 0
	for i := range servers {
		servers[i].print(stdout)
		if len(servers[i].Problems) > 0 {
			bad++
		}
	}
	if bad > 0 {
		fmt.Fprintf(stderr, "sluice check: %d of the engines' servers do not match the configuration\n", bad)
		return 1
	}
	return 0
}

// removedWithin returns the time after which a dead worker is removed from the choice, with requests
// and without.
func removedWithin(cfg *config.Config) (busy, idle time.Duration) {
	h := cfg.Health
	pace := fleet.Options{ProbeInterval: h.Interval, ProbeTimeout: h.Timeout, UnhealthyThreshold: h.UnhealthyThreshold}
	return pace.DetectWithin(), pace.DetectIdleWithin(countServers(cfg.Specs()))
}

// checkReport is the JSON of a check.
type checkReport struct {
	Valid    bool            `json:"valid"`
	Errors   []checkError    `json:"errors,omitempty"`
	Warnings []string        `json:"warnings,omitempty"`
	Effect   string          `json:"effect,omitempty"` // the page that the command prints without --json
	Busy     float64         `json:"dead_worker_with_requests_removed_within_s,omitempty"`
	Idle     float64         `json:"dead_worker_removed_within_s,omitempty"`
	Servers  []checkedServer `json:"servers,omitempty"` // with --probe
}

// checkError is one error. File, line and column are of the place in the file; From names a flag or a
// variable of the environment instead.
type checkError struct {
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"`
	Column  int    `json:"column,omitempty"`
	From    string `json:"from,omitempty"`
	Field   string `json:"field,omitempty"`
	Message string `json:"message"`
}

// runCheckJSON is runCheck with a report on standard output.
func runCheckJSON(flags *config.Flags, probe bool, timeout time.Duration, stdout, stderr io.Writer) int {
	r := checkConfig(flags, probe, timeout)
	if err := encodeJSON(stdout, r); err != nil {
		fmt.Fprintf(stderr, "sluice check: %v\n", err)
		return 1
	}
	if !r.Valid {
		return 1
	}
	return 0
}

func checkConfig(flags *config.Flags, probe bool, timeout time.Duration) (r checkReport) {
	cfg, err := flags.Resolve(os.Environ())
	var list config.Errors
	switch {
	case errors.As(err, &list):
		for _, e := range list {
			r.Errors = append(r.Errors, checkError{e.File, e.Line, e.Col, e.From, e.Field, e.Msg})
		}
		return r
	case err != nil:
		r.Errors = []checkError{{Message: err.Error()}}
		return r
	}
	for _, err := range app.CheckStart(cfg) {
		r.Errors = append(r.Errors, checkError{Message: err.Error()})
	}
	if len(r.Errors) > 0 {
		return r
	}
	busy, idle := removedWithin(cfg)
	r.Valid, r.Warnings, r.Effect, r.Busy, r.Idle = true, cfg.Warnings(), cfg.Describe(), busy.Seconds(), idle.Seconds()
	if !probe {
		return r
	}
	if r.Servers, err = probeServers(cfg, timeout); err != nil {
		r.Valid, r.Errors = false, []checkError{{Message: err.Error()}}
		return r
	}
	r.Servers = append(r.Servers, checkHandOvers(cfg)...)
	r.Valid = !slices.ContainsFunc(r.Servers, func(s checkedServer) bool { return len(s.Problems) > 0 })
	return r
}

// countServers returns the number of HTTP servers of the workers. Each rank with a URL of its
// own has a server; otherwise the worker has one.
func countServers(specs []worker.Spec) (n int) {
	for i := range specs {
		n += max(len(specs[i].RankURLs), 1)
	}
	return n
}

// checkedServer is a server and what the probe says of it.
type checkedServer struct {
	Worker     string   `json:"worker"`
	URL        string   `json:"url"`
	Engine     string   `json:"engine,omitempty"`
	Version    string   `json:"version,omitempty"`
	Models     []string `json:"models,omitempty"`
	BlockSize  int      `json:"block_size,omitempty"`
	EventRanks int      `json:"kv_event_ranks,omitempty"`
	Problems   []string `json:"problems,omitempty"` // none: it answers and matches the configuration
	Notes      []string `json:"notes,omitempty"`
	answered   bool
}

// print prints one or more lines.
func (s *checkedServer) print(w io.Writer) {
	mark := "ok   "
	if len(s.Problems) > 0 {
		mark = "FAULT"
	}
	fmt.Fprintf(w, "  %s %s at %s", mark, s.Worker, s.URL)
	if s.answered {
		fmt.Fprintf(w, ": %s; models %s; %s a block; events of %s", strings.TrimSpace(engineName(s.Engine)+" "+comment(s.Version)), comment(strings.Join(s.Models, ", ")), english.Plural(s.BlockSize, "token", ""), english.Plural(s.EventRanks, "rank", ""))
	}
	fmt.Fprintln(w)
	for _, f := range s.Problems {
		fmt.Fprintf(w, "        %s\n", comment(f))
	}
	for _, n := range s.Notes {
		fmt.Fprintf(w, "        note: %s\n", comment(n))
	}
}

// probeServers probes every server of the configuration concurrently, as serve would.
func probeServers(cfg *config.Config, timeout time.Duration) ([]checkedServer, error) {
	opt, err := app.EngineOptions(cfg, timeout)
	if err != nil {
		return nil, err
	}
	specs := cfg.Specs()
	var servers []checkedServer
	var of []*worker.Spec // by server
	for i := range specs {
		urls := specs[i].RankURLs
		if len(urls) == 0 {
			urls = []string{specs[i].URL}
		}
		for _, u := range urls {
			servers, of = append(servers, checkedServer{Worker: specs[i].ID, URL: u}), append(of, &specs[i])
		}
	}
	var wg sync.WaitGroup
	for i := range servers {
		wg.Go(func() {
			s := &servers[i]
			a := probeURL(s.URL, cmp.Or(of[i].HealthPath, cfg.Health.Path), timeout, opt)
			s.answered, s.Engine, s.Version, s.Models, s.BlockSize, s.EventRanks = a.Err == nil, a.Engine, a.Version, a.Names(), a.BlockSize, len(a.Events)
			s.Problems, s.Notes = mismatches(of[i], a), a.Notes
		})
	}
	wg.Wait()
	return servers, nil
}

// mismatches returns the differences between an engine and its entry in the configuration.
func mismatches(spec *worker.Spec, a *fleet.EngineInfo) (problems []string) {
	if a.Err != nil {
		return []string{a.Err.Error()}
	}
	for _, m := range spec.Models {
		if !slices.Contains(a.Names(), m) {
			problems = append(problems, fmt.Sprintf("it does not serve model %q", m))
		}
	}
	if a.RoleKnown && a.Role != spec.Role {
		problems = append(problems, fmt.Sprintf("its role is %s, not %s", a.Role, spec.Role))
	}
	if spec.Engine != "" && a.Engine != "" && spec.Engine != a.Engine {
		problems = append(problems, fmt.Sprintf("it is %s, not %s", a.Engine, spec.Engine))
	}
	if spec.BlockSize > 0 && a.BlockSize > 0 && spec.BlockSize != a.BlockSize {
		problems = append(problems, fmt.Sprintf("its blocks are of %d tokens, not %d", a.BlockSize, spec.BlockSize))
	}
	if why := a.MissingRanks(spec); why != "" {
		problems = append(problems, why)
	}
	return problems
}
