package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"sluice/router/admin"
)

// routerFlags are the flags by which a command selects a running router.
type routerFlags struct {
	addr string // --admin
	file string // --runtime-file
}

func (r *routerFlags) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&r.addr, "admin", "", "`ADDRESS` of the router's admin listener, with its token in SLUICE_ADMIN_TOKEN if there is no runtime file (default: the only running router of this user)")
	cmd.Flags().StringVar(&r.file, "runtime-file", "", "the router's runtime `FILE` (admin.runtime_file)")
}

// find returns the address and the token of a running router's admin listener. It reads
// them from the runtime file if one is given; otherwise it searches the default runtime files, for
// the given address if there is one. If none matches, it uses the address with the token in
// SLUICE_ADMIN_TOKEN.
func (r *routerFlags) find() (admin.Runtime, error) {
	if r.file != "" {
		return admin.ReadRuntimeFile(r.file)
	}
	rt, err := admin.Find(r.addr)
	if token := os.Getenv("SLUICE_ADMIN_TOKEN"); err != nil && r.addr != "" && token != "" {
		return admin.Runtime{Address: r.addr, Token: token}, nil
	}
	return rt, err
}

// printNotFound prints the error of find and what to do next. find does not find a
// running router of another user or with admin.runtime_file set. signal is the name of the
// signal that has the same effect as the command; "" if there is none.
func printNotFound(stderr io.Writer, command, addr, signal string, err error) {
	fmt.Fprintf(stderr, "sluice %s: %v\n", command, err)
	if !errors.Is(err, admin.ErrNoRouter) {
		return
	}
	file := filepath.Join(admin.RuntimeDir(), "*.json")
	if addr != "" {
		file = admin.DefaultRuntimeFile(addr)
	}
	fmt.Fprintf(stderr, "There is no runtime file %s of a running router. "+
		"Where it has another (admin.runtime_file), name that with --runtime-file FILE, "+
		"or the router with --admin HOST:PORT and its token in SLUICE_ADMIN_TOKEN.\n", file)
	if signal != "" {
		fmt.Fprintf(stderr, "`kill -%s PID` does the same, and tells of it in the router's log.\n", signal)
	}
	fmt.Fprintln(stderr, "Where none runs, start one with `sluice serve` or `sluice demo`.")
}
