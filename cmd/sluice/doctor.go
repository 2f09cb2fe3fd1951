package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/spf13/cobra"

	"sluice/router/config"
)

var doctorLong = `Reports which of the libraries that observe KV transfers or tokenize prompts work on this machine,
where they were found and in which version; which limits and devices the machine has; why something
does not work, and what to do about it. Each library is loaded and tried in a process of its own, so
one that hangs or crashes affects its line only. With --config the tokenizers of the models
(models.NAME.tokenizer) are loaded as well, and tried with a chat and a text. Nothing is changed.

The checks are ` + strings.Join(doctorNames, ", ") + `.
A check is required if the configuration of --config needs it or --require names it.`

const doctorExamples = `
  sluice doctor                                    what this machine has
  sluice doctor --config sluice.yaml               whether it has what the configuration needs
  sluice doctor --python /opt/vllm --require nixl  whether an engine's NIXL works here
  sluice doctor --json | jq '.findings[] | select(.state != "ok")'`

// finding is the result of one check.
type finding struct {
	Name     string   `json:"name"`
	State    string   `json:"state"`    // ok, limited, off, hung, crashed
	Required bool     `json:"required"` // the configuration or --require needs it
	Detail   string   `json:"detail"`
	Advice   string   `json:"advice,omitempty"`   // what the operator should do; "" if nothing
	Attempts []string `json:"attempts,omitempty"` // places searched, each with the outcome
}

// aliasedFinding is a finding in the output of --json, which has the former names of two members
// for one release.
type aliasedFinding struct {
	finding
	Asked bool     `json:"asked"`           // deprecated: required
	Tried []string `json:"tried,omitempty"` // deprecated: attempts
}

func aliased(all []finding) []aliasedFinding {
	out := make([]aliasedFinding, len(all))
	for i, f := range all {
		out[i] = aliasedFinding{f, f.Required, f.Attempts}
	}
	return out
}

const (
	findingOK      = "ok"
	findingLimited = "limited" // works, but a limit may be too low
	findingOff     = "off"
	findingHung    = "hung"
	findingCrashed = "crashed"
)

var doctorNames = []string{"nixl", "ucx", "zmq", "cuda", "tokenizer", "memlock", "rdma", "files", "io_uring"}

// doctor is the state of one run of the command.
type doctor struct {
	root         string // prefix of /sys and /dev; "" except in tests
	timeout      time.Duration
	probe        probeRequest
	maxConns     int // limits.max_conns; 0 without a configuration
	required     []string
	tokenizers   map[string]string // models.NAME.tokenizer by model, if serve would load them
	wantsNIXL    bool              // serve would use NIXL if present, and runs without it otherwise
	probeCommand []string          // command line of a probe process, without probeArgument
}

func doctorCommand() *cobra.Command {
	var o doctorFlags
	cmd := newCommand(cobra.Command{
		Use: "doctor [flags]", GroupID: groupConfigure, Short: "report which libraries, devices and limits this machine has", Long: doctorLong, Example: doctorExamples,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 && args[0] == probeArgument {
				return nil
			}
			return noArgs(cmd, args)
		},
	}, "0 all that is required works, 1 some of it does not", func(cmd *cobra.Command, args []string) int {
		if len(args) == 1 {
			return probeMain(os.Stdin, os.NewFile(3, "answer"))
		}
		return runDoctor(&o, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	fs := cmd.Flags()
	fs.StringVar(&o.config, "config", "", "check whether this machine has what the configuration in `FILE` needs")
	fs.BoolVar(&o.asJSON, "json", false, "print JSON")
	fs.StringVar(&o.required, "require", "", "comma-separated `NAMES` of checks that must succeed")
	fs.StringVar(&o.probe.NIXL, "nixl", "", "`PATH` of libnixl_capi or its folder; nothing else is tried (default: transfers.nixl_library)")
	fs.StringVar(&o.probe.UCX, "ucx", "", "`PATH` of libucp or its folder; nothing else is tried (default: transfers.ucx_library)")
	fs.StringArrayVar(&o.probe.Python, "python", nil, "`PREFIX` of an engine's Python environment; may be repeated (default: transfers.python)")
	fs.DurationVar(&o.timeout, "timeout", 20*time.Second, "`DURATION` of the check of one library")
	completeFlag(cmd, "require", doctorNames...)
	return cmd
}

// doctorFlags are the values of the command's flags.
type doctorFlags struct {
	config, required string

	asJSON  bool
	probe   probeRequest
	timeout time.Duration
}

func runDoctor(o *doctorFlags, stdout, stderr io.Writer) int {
	d := doctor{timeout: o.timeout, probe: o.probe}
	if d.timeout < 100*time.Millisecond {
		fmt.Fprintf(stderr, "sluice doctor: --timeout is %s; want 100ms or more\n", d.timeout)
		return 2
	}
	for name := range strings.SplitSeq(o.required, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if !slices.Contains(doctorNames, name) {
			fmt.Fprintf(stderr, "sluice doctor: --require names %q; want some of %s\n", name, strings.Join(doctorNames, ", "))
			return 2
		}
		d.required = append(d.required, name)
	}
	if o.config != "" {
		if err := d.configured(o.config); err != nil {
			fmt.Fprintln(stderr, err)
			return 1
		}
	}
	probeCommand, err := os.Executable()
	if err != nil {
		fmt.Fprintln(stderr, "sluice doctor: cannot find its own file to start the probes:", err)
		return 1
	}
	d.probeCommand = []string{probeCommand, "doctor"}
	return d.report(d.examine(), o.asJSON, stdout, stderr)
}

// configured sets the requirements of d from a configuration file.
func (d *doctor) configured(file string) error {
	c, err := config.LoadWithEnv(file, os.Environ())
	if err != nil {
		return err
	}
	t := &c.Transfers
	d.probe.NIXL = cmp.Or(d.probe.NIXL, t.NIXLLibrary)
	d.probe.Python = append(d.probe.Python, t.Python...)
	d.probe.UCX = cmp.Or(d.probe.UCX, t.UCXLibrary)
	if t.UCX == "on" {
		d.required = append(d.required, "ucx")
	}
	if t.NIXL == "on" || t.SideChannel == "renew" || t.SideChannel == "release" {
		d.required = append(d.required, "nixl")
	}
	d.wantsNIXL = c.WantsNIXL()
	if c.ReportEndpoint() != "" || c.UsesFamily("lmcache") {
		d.required = append(d.required, "zmq")
	}
	d.maxConns = c.Limits.MaxConns
	d.probe.Config, d.tokenizers = file, map[string]string{}
	for name, m := range c.Models {
		if m.Tokenizer != "" && c.Tokens.Native != "off" {
			d.tokenizers[name] = m.Tokenizer
		}
	}
	return nil
}

// examine runs all checks, those of the libraries concurrently.
func (d *doctor) examine() []finding {
	all := make([]finding, len(doctorNames))
	var wg sync.WaitGroup
	for i, name := range doctorNames {
		wg.Go(func() {
			switch name {
			case "memlock":
				all[i] = memlockFinding(d.hasRDMA())
			case "rdma":
				all[i] = d.rdmaFinding()
			case "files":
				all[i] = filesFinding(d.maxConns)
			case "io_uring":
				all[i] = uringFinding()
			case "tokenizer":
				all[i] = d.tokenizerFinding()
			default:
				r := d.probe
				r.Library = name
				all[i] = d.runProbe(r)
			}
			f := &all[i]
			f.Name, f.Required = name, slices.Contains(d.required, name)
			if name == "nixl" && d.wantsNIXL && !f.Required && f.State != findingOK {
				f.Detail += "; transfers.nixl is auto, so serve runs without it"
			}
		})
	}
	wg.Wait()
	return all
}

// report prints the findings and returns the exit code.
func (d *doctor) report(all []finding, asJSON bool, stdout, stderr io.Writer) int {
	var missing []string
	for _, f := range all {
		if f.Required && f.State != findingOK && f.State != findingLimited {
			missing = append(missing, f.Name)
		}
	}
	if asJSON {
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		_ = e.Encode(struct {
			Version  string           `json:"version"`
			System   string           `json:"system"`
			OK       bool             `json:"ok"` // every required finding works
			Findings []aliasedFinding `json:"findings"`
		}{version, runtime.GOOS + "/" + runtime.GOARCH, len(missing) == 0, aliased(all)})
	} else {
		for _, f := range all {
			mark := ""
			if f.Required {
				mark = "required; "
			}
			fmt.Fprintf(stdout, "%-8s %-9s %s%s\n", f.State, f.Name, mark, oneLine(f.Detail))
			for _, t := range f.Attempts {
				fmt.Fprintf(stdout, "%18s tried: %s\n", "", oneLine(t))
			}
			if f.Advice != "" {
				fmt.Fprintf(stdout, "%18s do: %s\n", "", oneLine(f.Advice))
			}
		}
	}
	if len(missing) > 0 {
		if !asJSON {
			fmt.Fprintf(stderr, "sluice doctor: required and not working: %s\n", strings.Join(missing, ", "))
		}
		return 1
	}
	return 0
}

// oneLine replaces the characters of a library's message that would break the table or the terminal:
// control characters, C1 ones included, and those that change the direction of the text.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, s)
}

var errNoAnswer = errors.New("no answer")
