package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"sluice/router/config"
)

const doctorUsage = `Usage: sluice doctor [--config FILE] [--require NAME,…] [--json]

Says which of the libraries that tell of KV transfers were found, where and in what
version; which limits and devices of this machine they meet; why something is off,
and what to do about it. Libraries are loaded and tried in processes of their own:
one that hangs or crashes costs a line. Nothing is changed.

Names: ` + "nixl, ucx, zmq, cuda (memory of GPUs), memlock, rdma, files, io_uring" + `.
What is asked for comes from the configuration (with it, transfers.nixl: on and
transfers.side_channel ask for nixl) and from --require. Exit code: 0 all that is
asked for works, 1 some of it does not, 2 called wrongly.

Examples:
  sluice doctor                                  what this machine has
  sluice doctor --config sluice.yaml             whether it has what that asks for
  sluice doctor --python /opt/vllm --require nixl   whether an engine's NIXL works here
  sluice doctor --json | jq '.findings[] | select(.state != "ok")'

Flags:
`

// finding is the result of one check.
type finding struct {
	Name     string   `json:"name"`
	State    string   `json:"state"` // ok, limited, off, hung, crashed
	Required bool     `json:"asked"` // the configuration or --require needs it
	Detail   string   `json:"detail"`
	Advice   string   `json:"advice,omitempty"` // what the operator should do; "" if nothing
	Attempts []string `json:"tried,omitempty"`  // places searched, each with the outcome
}

const (
	findingOK      = "ok"
	findingLimited = "limited" // works, but a limit may be too low
	findingOff     = "off"
	findingHung    = "hung"
	findingCrashed = "crashed"
)

var doctorNames = []string{"nixl", "ucx", "zmq", "cuda", "memlock", "rdma", "files", "io_uring"}

// doctor is the state of one run of the command.
type doctor struct {
	root         string // prefix of /sys and /dev; "" except in tests
	timeout      time.Duration
	probe        probeRequest
	maxConns     int // limits.max_conns; 0 without a configuration
	required     []string
	wantsNIXL    bool     // serve would use NIXL if present, and runs without it otherwise
	probeCommand []string // command line of a probe process, without probeArgument
}

func runDoctor(args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && args[0] == probeArgument {
		return probeMain(os.Stdin, os.NewFile(3, "answer"))
	}
	fs := flag.NewFlagSet("sluice doctor", flag.ContinueOnError)
	fs.SetOutput(stderr)
	d := doctor{}
	file := fs.String("config", "", "check whether this machine has what the configuration in `FILE` needs")
	asJSON := fs.Bool("json", false, "print JSON")
	required := fs.String("require", "", "comma-separated `NAMES` of libraries that must work")
	fs.StringVar(&d.probe.NIXL, "nixl", "", "libnixl_capi's `FILE` or folder, and then nothing else is tried [transfers.nixl_library]")
	fs.StringVar(&d.probe.UCX, "ucx", "", "libucp's `FILE` or folder, likewise")
	fs.Func("python", "`PREFIX` of an engine's Python environment; may be given again [transfers.python]", func(v string) error {
		d.probe.Python = append(d.probe.Python, v)
		return nil
	})
	fs.DurationVar(&d.timeout, "timeout", 20*time.Second, "for each library")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), doctorUsage)
		fs.PrintDefaults()
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	if d.timeout < 100*time.Millisecond {
		fmt.Fprintf(stderr, "sluice doctor: --timeout is %s; want 100ms or more\n", d.timeout)
		return 2
	}
	for name := range strings.SplitSeq(*required, ",") {
		if name = strings.TrimSpace(name); name == "" {
			continue
		}
		if !slices.Contains(doctorNames, name) {
			fmt.Fprintf(stderr, "sluice doctor: --require names %q; want some of %s\n", name, strings.Join(doctorNames, ", "))
			return 2
		}
		d.required = append(d.required, name)
	}
	if *file != "" {
		if err := d.configured(*file); err != nil {
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
	return d.report(d.examine(), *asJSON, stdout, stderr)
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
			default:
				all[i] = d.runProbe(name)
			}
			f := &all[i]
			f.Name, f.Required = name, slices.Contains(d.required, name)
			if name == "nixl" && d.wantsNIXL && !f.Required && f.State != findingOK {
				f.Detail += "; transfers.nixl is auto: serve goes without"
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
			Version  string    `json:"version"`
			System   string    `json:"system"`
			OK       bool      `json:"ok"` // every required finding works
			Findings []finding `json:"findings"`
		}{version, runtime.GOOS + "/" + runtime.GOARCH, len(missing) == 0, all})
	} else {
		for _, f := range all {
			mark := ""
			if f.Required {
				mark = "asked for; "
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

// oneLine replaces the control characters of a library's message, which would break the table
// or the terminal.
func oneLine(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f {
			return ' '
		}
		return r
	}, s)
}

var errNoAnswer = errors.New("no answer")
