package main

import (
	"encoding/json"
	"fmt"
	"io"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"sluice/router/admin"
	"sluice/router/config"
)

const reloadLong = `Makes a running router read its configuration file again and apply what can change while it runs.
It prints each changed field and whether it is in effect now or needs sluice restart. A file with
an error changes nothing; the error gives line and column. SIGHUP has the same effect, with the
result in the log.`

const reloadExample = `
  sluice reload                            the only running router of this user
  sluice reload --dry-run                  what would change
  sluice reload --admin 127.0.0.1:9902     one of several routers
  sluice reload && sluice restart          apply everything without losing a request`

func reloadCommand() *cobra.Command {
	var target routerFlags
	var dry, asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "reload [flags]", GroupID: groupOperate, Short: "apply an edited configuration to a running router", Long: reloadLong, Example: reloadExample,
	}, "0 reloaded, 1 no router found, not confirmed, or an error in the file", func(cmd *cobra.Command, _ []string) int {
		return runReload(cmd, target, dry, asJSON)
	})
	target.addChange(cmd)
	cmd.Flags().BoolVar(&dry, "dry-run", false, "change nothing; print what would change")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the result as JSON")
	return cmd
}

// runReload makes a running router reload its configuration and prints the changes.
func runReload(cmd *cobra.Command, target routerFlags, dry, asJSON bool) int {
	ctx, stdout, stderr := cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()
	rt, err := target.find()
	if err != nil {
		signal := "HUP"
		if dry {
			signal = "" // no signal requests a dry run
		}
		printNotFound(stderr, "reload", target.addr, signal, err)
		return 1
	}
	if !dry && !target.confirm(cmd, rt, "Reloading the configuration of") {
		return 1
	}
	c := admin.NewClient(rt)
	defer c.Close()
	changes, err := c.Reload(ctx, dry)
	if err == nil {
		if asJSON {
			err = json.NewEncoder(stdout).Encode(map[string]any{"changes": changes})
		} else {
			printChanges(stdout, changes, dry)
		}
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice reload:", err)
		return 1
	}
	return 0
}

func printChanges(w io.Writer, changes []config.Change, dry bool) {
	if len(changes) == 0 {
		fmt.Fprintln(w, "nothing differs from what is in effect")
		return
	}
	shown := func(s string) string {
		if s == "" {
			return "none"
		}
		return s
	}
	count := map[config.Effect]int{}
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, c := range changes {
		count[c.Effect]++
		fmt.Fprintf(tab, "%s\t%s\t%s -> %s\n", c.Effect, c.Path, shown(c.Old), shown(c.New))
	}
	tab.Flush()
	for _, c := range changes {
		if c.Reason != "" {
			fmt.Fprintf(w, "%s: %s\n", c.Path, c.Reason)
		}
		if c.Warning != "" {
			fmt.Fprintf(w, "%s: warning: %s\n", c.Path, c.Warning)
		}
	}
	verb := "applied"
	if dry {
		verb = "would be applied"
	}
	fmt.Fprintf(w, "%d %s", count[config.Applied], verb)
	if n := count[config.Restart]; n > 0 {
		fmt.Fprintf(w, ", %d not in effect before sluice restart", n)
	}
	fmt.Fprintln(w)
}
