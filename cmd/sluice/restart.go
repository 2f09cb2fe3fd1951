package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"sluice/router/admin"
)

const restartLong = `Replaces a running router with a new process of the same program file, flags and environment,
without losing a request: the new process takes over the listeners, and the old one ends when its
requests have ended. The command returns when the new process serves. If the new process does not
become ready, the old one continues and the reason is printed. SIGUSR2 has the same effect.`

const restartExample = `
  sluice restart                           the only running router of this user
  sluice restart --admin 127.0.0.1:9902    one of several routers`

func restartCommand() *cobra.Command {
	var target routerFlags
	var asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "restart [flags]", GroupID: groupOperate, Short: "replace a running router with a new process without losing requests", Long: restartLong, Example: restartExample,
	}, "0 replaced, 1 no router found, not confirmed, or the new one not ready", func(cmd *cobra.Command, _ []string) int {
		return runRestart(cmd, target, asJSON)
	})
	target.addChange(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the new process id as JSON")
	return cmd
}

// runRestart makes a running router replace itself with a new process.
func runRestart(cmd *cobra.Command, target routerFlags, asJSON bool) int {
	ctx, stdout, stderr := cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()
	rt, err := target.find()
	if err != nil {
		printNotFound(stderr, "restart", target.addr, "USR2", err)
		return 1
	}
	if !target.confirm(cmd, rt, "Replacing the process of") {
		return 1
	}
	c := admin.NewClient(rt)
	defer c.Close()
	pid, err := c.Restart(ctx)
	if err != nil {
		fmt.Fprintln(stderr, "sluice restart:", err)
		return 1
	}
	if asJSON {
		if err := encodeJSON(stdout, map[string]int{"pid": pid}); err != nil {
			fmt.Fprintln(stderr, "sluice restart:", err)
			return 1
		}
		return 0
	}
	replaced := "the router at " + rt.Address
	if rt.PID != 0 { // known only from a runtime file
		replaced = fmt.Sprintf("process %d", rt.PID)
	}
	fmt.Fprintf(stdout, "process %d replaced %s\n", pid, replaced)
	return 0
}
