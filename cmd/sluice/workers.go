package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"sluice/dataplane/jsonscan"
	"sluice/router/admin"
	"sluice/router/config"
)

// requestTimeout bounds a request to the admin API.
const requestTimeout = 10 * time.Second

const workersLong = `Prints the workers of a running router: a line for each rank, with the worker's state, the requests
in flight from this router, the requests that the engine reports as running and waiting, the usage
of its KV cache, the tokens that this router has sent it to prefill, and the state of its KV event
feed and of its breaker. The last column is the reason why a worker is not ready.`

const workersExample = `
  sluice workers
  sluice workers --json | jq '.workers[] | select(.state != "ready")'`

func workersCommand() *cobra.Command {
	var target routerFlags
	var asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "workers [flags]", GroupID: groupOperate, Short: "list the workers of a running router", Long: workersLong, Example: workersExample,
	}, "0 printed, 1 no router found", func(cmd *cobra.Command, _ []string) int {
		return withRouter(cmd, &target, func(ctx context.Context, c *admin.Client) error {
			workers, err := c.Workers(ctx)
			switch {
			case err != nil:
				return err
			case asJSON:
				return encodeJSON(cmd.OutOrStdout(), map[string]any{"workers": workers})
			}
			writeWorkers(cmd.OutOrStdout(), workers)
			return nil
		})
	})
	target.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, as GET /admin/v1/workers does")
	return cmd
}

// withRouter calls f with a client of the router and returns the exit code. It prints the error of f.
func withRouter(cmd *cobra.Command, target *routerFlags, f func(context.Context, *admin.Client) error) int {
	c, _ := target.connect(cmd)
	if c == nil {
		return 1
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(cmd.Context(), requestTimeout)
	defer cancel()
	if err := f(ctx, c); err != nil {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s: %v\n", cmd.CommandPath(), err)
		return 1
	}
	return 0
}

// encodeJSON prints v, indented, with escapes for characters that a terminal might interpret.
func encodeJSON(w io.Writer, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	_, err := w.Write(jsonscan.EscapeUnprintable(b.Bytes()))
	return err
}

// findWorker returns the worker id among all workers of the router, or an error with the nearest name.
func findWorker(ctx context.Context, c *admin.Client, id string) (w *admin.Worker, all []admin.Worker, err error) {
	all, err = c.Workers(ctx)
	if err != nil {
		return nil, nil, err
	}
	var known []string
	for i := range all {
		if all[i].ID == id {
			return &all[i], all, nil
		}
		known = append(known, all[i].ID)
	}
	return nil, nil, fmt.Errorf("the router has no worker %q%s; `sluice workers` lists them", id, config.Suggestion(id, known))
}

// rankRow is a rank and its worker.
type rankRow struct {
	worker *admin.Worker
	rank   *admin.Rank
}

// rankRows returns the ranks of workers.
func rankRows(workers []admin.Worker) []rankRow {
	var rows []rankRow
	for i := range workers {
		for j := range workers[i].Ranks {
			rows = append(rows, rankRow{&workers[i], &workers[i].Ranks[j]})
		}
	}
	return rows
}

// writeWorkers prints a table of the ranks of all workers.
func writeWorkers(w io.Writer, workers []admin.Worker) { writeRanks(w, rankRows(workers), 0, 0) }

// writeRanks prints a table of ranks, with names of workers, engines and models of at most so many characters;
// 0: of any length.
func writeRanks(w io.Writer, rows []rankRow, name, models int) {
	if len(rows) == 0 {
		fmt.Fprintln(w, "the router has no workers")
		return
	}
	var b bytes.Buffer
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "WORKER\tROLE\tSTATE\tREQUESTS\tRUNNING\tWAITING\tKV USED\tTO PREFILL\tEVENTS\tBREAKER\tENGINE\tMODELS\tREASON")
	for _, row := range rows {
		wk, r := row.worker, row.rank
		id, reason := wk.ID, ""
		if len(wk.Ranks) > 1 {
			id = r.ID
		}
		if wk.State != "ready" {
			reason = wk.Reason
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%d\t%s\t%s\t%s\t%d\t%s\t%s\t%s\t%s\t%s\n", clip(id, name), oneLine(wk.Role), oneLine(wk.State), r.Requests, reported(r.Running), reported(r.Waiting),
			usage(r.KVUsage), r.PrefillTokens, oneLine(r.Feed), oneLine(r.Breaker), clip(strings.TrimSpace(engineName(wk.Engine)+" "+wk.Version), name), clip(strings.Join(wk.Models, ","), models), oneLine(reason))
	}
	t.Flush()
	for line := range strings.Lines(b.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

// clip returns s on one line, with at most so many characters; 0: with any number. It leaves out the middle,
// because names of workers differ at their ends.
func clip(s string, most int) string {
	s = oneLine(s)
	r := []rune(s)
	if most <= 0 || len(r) <= most {
		return s
	}
	end := most / 2
	return string(r[:most-end-1]) + "…" + string(r[len(r)-end:])
}

// usage prints the share of KV blocks in use, "?" if the engine does not report it.
func usage(share float64) string {
	if share < 0 {
		return "?"
	}
	return fmt.Sprintf("%.0f %%", 100*share)
}

// reported prints a number that an engine may not report.
func reported(n int64) string {
	if n < 0 {
		return "?"
	}
	return fmt.Sprint(n)
}
