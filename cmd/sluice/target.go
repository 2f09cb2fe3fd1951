package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sluice/router/admin"
)

// routerFlags are the flags by which a command selects a running router.
type routerFlags struct {
	addr string // --admin
	file string // --runtime-file
	yes  bool   // --yes of a command that changes the router
}

// addChange adds the flags of a command that changes the router.
func (r *routerFlags) addChange(cmd *cobra.Command) {
	r.add(cmd)
	cmd.Flags().BoolVarP(&r.yes, "yes", "y", false, "do not ask for confirmation (default: ask on a terminal unless --admin or --runtime-file is given)")
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

// identityTimeout bounds the request for the identity of a router.
const identityTimeout = 2 * time.Second

// confirm prints to standard error which router the command is about to change, and how. If the
// command found the router itself, standard input is a terminal and --yes is not given, it asks
// whether to continue. It returns false if the answer is not yes.
func (r *routerFlags) confirm(cmd *cobra.Command, rt admin.Runtime, change string) bool {
	stderr := cmd.ErrOrStderr()
	fmt.Fprintf(stderr, "%s the router at %s\n", change, r.describe(cmd.Context(), rt))
	terminal, isTerminal := cmd.InOrStdin().(*os.File)
	if r.yes || r.addr != "" || r.file != "" || !isTerminal || !isatty(terminal) {
		return true
	}
	fmt.Fprint(stderr, "Continue? [y/N] ")
	answer, err := bufio.NewReader(io.LimitReader(terminal, 256)).ReadString('\n')
	switch strings.ToLower(strings.TrimSpace(answer)) {
	case "y", "yes":
		if err == nil {
			return true
		}
	}
	fmt.Fprintf(stderr, "%s: not confirmed, nothing was changed; --yes skips the question\n", cmd.CommandPath())
	return false
}

// describe returns the address, configuration file, process id and uptime of a router, as it reports
// them, or as its runtime file does.
func (r *routerFlags) describe(ctx context.Context, rt admin.Runtime) string {
	id := admin.Identity{Address: rt.Address, PID: rt.PID, Config: rt.Config, Version: rt.Version}
	if !rt.Started.IsZero() {
		id.UptimeS = time.Since(rt.Started).Seconds()
	}
	ctx, cancel := context.WithTimeout(ctx, identityTimeout)
	defer cancel()
	c := admin.NewClient(rt)
	defer c.Close()
	if reported, err := c.Identity(ctx); err == nil { // a router of an earlier release has no such route
		id = *reported
	}
	return describeIdentity(&id)
}

func describeIdentity(id *admin.Identity) string {
	var parts []string
	if id.Listen != "" {
		parts = append(parts, "clients at "+id.Listen)
	}
	if id.Config != "" {
		parts = append(parts, "configuration "+oneLine(id.Config))
	} else if id.PID != 0 {
		parts = append(parts, "no configuration file")
	}
	if id.PID != 0 {
		parts = append(parts, fmt.Sprintf("pid %d", id.PID))
	}
	if id.UptimeS > 0 {
		parts = append(parts, fmt.Sprintf("up %v", time.Duration(id.UptimeS*float64(time.Second)).Round(time.Second)))
	}
	if id.Version != "" {
		parts = append(parts, "version "+oneLine(id.Version))
	}
	if len(parts) == 0 {
		return id.Address
	}
	return id.Address + " (" + strings.Join(parts, ", ") + ")"
}

// connect finds the router and returns a client for it. If there is none, it prints why and returns
// nil.
func (r *routerFlags) connect(cmd *cobra.Command) (*admin.Client, admin.Runtime) {
	rt, err := r.find()
	if err != nil {
		printNotFound(cmd.ErrOrStderr(), cmd.Name(), r.addr, "", err)
		return nil, rt
	}
	return admin.NewClient(rt), rt
}

// completionTimeout bounds the request of a completion, during which the shell waits.
const completionTimeout = 500 * time.Millisecond

// completeWorkers returns the ids of the router's workers that keep accepts, for completion.
func (r *routerFlags) completeWorkers(cmd *cobra.Command, args []string, keep func(*admin.Worker) bool) ([]string, cobra.ShellCompDirective) {
	rt, err := r.find()
	if err != nil || len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	defer cancel()
	c := admin.NewClient(rt)
	defer c.Close()
	workers, err := c.Workers(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var ids []string
	for i := range workers {
		if w := &workers[i]; keep(w) {
			ids = append(ids, fmt.Sprintf("%s\t%s, %s", w.ID, w.Role, w.State))
		}
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
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
		"If the router has another one (admin.runtime_file), give it by --runtime-file FILE, "+
		"or give its address by --admin HOST:PORT and its token in SLUICE_ADMIN_TOKEN.\n", file)
	if signal != "" {
		fmt.Fprintf(stderr, "`kill -%s PID` has the same effect, with the result in the router's log.\n", signal)
	}
	fmt.Fprintln(stderr, "If no router runs, start one with `sluice serve` or `sluice demo`.")
}
