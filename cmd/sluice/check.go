package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

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
	var probe bool
	var timeout time.Duration
	cmd := newCommand(cobra.Command{
		Use: "check [flags]", GroupID: groupConfigure, Short: "validate a configuration and print its effect", Long: checkLong, Example: checkExample,
		Annotations: map[string]string{notes: workerKeyNotes()},
	}, "0 valid, 1 invalid", func(cmd *cobra.Command, _ []string) int {
		return runCheck(flags, probe, timeout, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	completeConfig(cmd)
	cmd.Flags().BoolVar(&probe, "probe", false, "also probe the engines, and fail unless each answers and matches the configuration")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Second, "`DURATION` of each probe request to an engine")
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
	h := cfg.Health
	pace := fleet.Options{ProbeInterval: h.Interval, ProbeTimeout: h.Timeout, FailAfter: h.FailAfter}
	fmt.Fprintf(stdout, "\na dead worker with requests is removed from the choice within %s; one without, within %s\n",
		pace.DetectWithin(), pace.DetectIdleWithin(countServers(cfg.Specs())))
	if !probe {
		return 0
	}
	fmt.Fprintln(stdout, "\nengines probed:")
	bad, err := probeServers(cfg, timeout, stdout)
	if err != nil {
		fmt.Fprintf(stderr, "sluice check: %v\n", err)
		return 1
	}
	if bad += checkHandOvers(cfg, stdout); bad > 0 {
		fmt.Fprintf(stderr, "sluice check: %d of the engines' servers do not match the configuration\n", bad)
		return 1
	}
	return 0
}

// countServers returns the number of HTTP servers of the workers. Each rank with a URL of its
// own has a server; otherwise the worker has one.
func countServers(specs []worker.Spec) (n int) {
	for i := range specs {
		n += max(len(specs[i].RankURLs), 1)
	}
	return n
}

// probeServers probes every server of the configuration concurrently, as serve would, and
// prints one or more lines for each. It returns the number of servers that do not answer or
// differ from the configuration.
func probeServers(cfg *config.Config, timeout time.Duration, stdout io.Writer) (failed int, err error) {
	opt, err := app.EngineOptions(cfg, timeout)
	if err != nil {
		return 0, err
	}
	specs := cfg.Specs()
	type server struct {
		spec   *worker.Spec
		url    string
		answer *fleet.EngineInfo
	}
	var servers []server
	for i := range specs {
		urls := specs[i].RankURLs
		if len(urls) == 0 {
			urls = []string{specs[i].URL}
		}
		for _, u := range urls {
			servers = append(servers, server{spec: &specs[i], url: u})
		}
	}
	var wg sync.WaitGroup
	for i := range servers {
		wg.Go(func() {
			servers[i].answer = probeURL(servers[i].url, cmp.Or(servers[i].spec.HealthPath, cfg.Health.Path), timeout, opt)
		})
	}
	wg.Wait()
	for _, s := range servers {
		problems := mismatches(s.spec, s.answer)
		if len(problems) > 0 {
			failed++
		}
		a := s.answer
		mark := "ok   "
		if len(problems) > 0 {
			mark = "FAULT"
		}
		fmt.Fprintf(stdout, "  %s %s at %s", mark, s.spec.ID, s.url)
		if a.Err == nil {
			fmt.Fprintf(stdout, ": %s; models %s; %d tokens a block; events of %d ranks", strings.TrimSpace(engineName(a.Engine)+" "+comment(a.Version)), comment(strings.Join(a.Names(), ", ")), a.BlockSize, len(a.Events))
		}
		fmt.Fprintln(stdout)
		for _, f := range problems {
			fmt.Fprintf(stdout, "        %s\n", comment(f))
		}
		for _, n := range a.Notes {
			fmt.Fprintf(stdout, "        note: %s\n", comment(n))
		}
	}
	return failed, nil
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
