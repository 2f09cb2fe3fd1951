package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"github.com/pebbe/zmq4"

	"sluice/native/dl"
	"sluice/nixl"
)

func runVersion(args []string, stdout, stderr io.Writer) int {
	if len(args) == 1 && (args[0] == "-h" || args[0] == "--help" || args[0] == "-help") {
		fmt.Fprint(stdout, "Usage: sluice version\n\nPrints the versions of sluice, Go, libzmq and the native library, and by what means\nKV transfers are observed.\n")
		return 0
	}
	if len(args) > 0 {
		fmt.Fprintf(stderr, "sluice version: unexpected argument %q; it takes none\n", args[0])
		return 2
	}
	major, minor, patch := zmq4.Version()
	tier, why := nixl.Active()
	fmt.Fprintf(stdout, "sluice %s\n", version)
	fmt.Fprintf(stdout, "  go      %s %s/%s\n", runtime.Version(), runtime.GOOS, runtime.GOARCH)
	fmt.Fprintf(stdout, "  libzmq  %d.%d.%d\n", major, minor, patch)
	fmt.Fprintf(stdout, "  native  abi %d\n", dl.ABI())
	fmt.Fprintf(stdout, "  kv tier %s: %s\n", tier, why)
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, d := range info.Deps {
			if d.Path == "github.com/valyala/fasthttp" {
				fmt.Fprintf(stdout, "  fasthttp %s\n", d.Version)
			}
		}
	}
	return 0
}
