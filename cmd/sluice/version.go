package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/pebbe/zmq4"
	"github.com/spf13/cobra"

	"sluice/native/dl"
	"sluice/nixl"
)

const versionLong = `Prints the versions of sluice, Go and libzmq, and how KV transfers are observed. With --json it also
reports which optional libraries (NIXL, UCX, CUDA, the native tokenizer) work on this machine; each
is loaded in a process of its own.`

func versionCommand() *cobra.Command {
	var asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "version [flags]", GroupID: groupOther, Short: "print versions", Long: versionLong, Example: "  sluice version\n  sluice version --json",
	}, "0 printed, 1 not written", func(cmd *cobra.Command, _ []string) int {
		return runVersion(asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, with the optional libraries")
	return cmd
}

// optionalLibraries are opened at run time where a machine has them.
var optionalLibraries = []string{"nixl", "ucx", "cuda", "tokenizer"}

// optionalProbeTimeout bounds the probe of one optional library.
const optionalProbeTimeout = 10 * time.Second

// versionInfo is the output of sluice version --json.
type versionInfo struct {
	Version   string            `json:"version"`
	Commit    string            `json:"commit,omitempty"`
	Date      string            `json:"date,omitempty"` // of the commit, RFC 3339
	Go        string            `json:"go"`
	Platform  string            `json:"platform"`
	LibZMQ    string            `json:"libzmq"`
	NativeABI int               `json:"native_abi"` // 0: built without cgo
	Libraries []optionalLibrary `json:"optional_libraries"`
}

type optionalLibrary struct {
	Name   string `json:"name"`
	State  string `json:"state"` // ok, limited, off, hung, crashed
	Detail string `json:"detail"`
}

// readVersion returns the versions without the optional libraries.
func readVersion() versionInfo {
	major, minor, patch := zmq4.Version()
	v := versionInfo{
		Version: version, Commit: commit, Date: date, Go: runtime.Version(), Platform: runtime.GOOS + "/" + runtime.GOARCH,
		LibZMQ: fmt.Sprintf("%d.%d.%d", major, minor, patch), NativeABI: dl.ABI(),
	}
	info, ok := debug.ReadBuildInfo()
	for i := 0; ok && i < len(info.Settings); i++ {
		switch s := info.Settings[i]; {
		case s.Key == "vcs.revision" && v.Commit == "":
			v.Commit = s.Value
		case s.Key == "vcs.time" && v.Date == "":
			v.Date = s.Value
		}
	}
	return v
}

func runVersion(asJSON bool, stdout, stderr io.Writer) int {
	v := readVersion()
	if asJSON {
		v.Libraries = probeOptionalLibraries()
		e := json.NewEncoder(stdout)
		e.SetIndent("", "  ")
		e.SetEscapeHTML(false)
		if err := e.Encode(v); err != nil {
			fmt.Fprintln(stderr, "sluice version:", err)
			return 1
		}
		return 0
	}
	tier, why := nixl.Active()
	fmt.Fprintf(stdout, "sluice %s\n", v.Version)
	if v.Commit != "" {
		fmt.Fprintf(stdout, "  commit  %s %s\n", v.Commit, v.Date)
	}
	fmt.Fprintf(stdout, "  go      %s %s\n", v.Go, v.Platform)
	fmt.Fprintf(stdout, "  libzmq  %s\n", v.LibZMQ)
	fmt.Fprintf(stdout, "  native  abi %d\n", v.NativeABI)
	fmt.Fprintf(stdout, "  kv tier %s: %s\n", tier, why)
	return 0
}

// probeOptionalLibraries tries each optional library as sluice doctor does.
func probeOptionalLibraries() []optionalLibrary {
	all := make([]optionalLibrary, len(optionalLibraries))
	self, err := os.Executable()
	if err != nil {
		for i, name := range optionalLibraries {
			all[i] = optionalLibrary{name, findingOff, "cannot find the program's own file to start the probe: " + err.Error()}
		}
		return all
	}
	d := doctor{timeout: optionalProbeTimeout, probeCommand: []string{self, "doctor"}}
	var wg sync.WaitGroup
	for i, name := range optionalLibraries {
		wg.Go(func() {
			f := d.runProbe(probeRequest{Library: name})
			all[i] = optionalLibrary{name, f.State, oneLine(f.Detail)}
		})
	}
	wg.Wait()
	return all
}
