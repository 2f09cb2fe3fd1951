package main

import (
	"context"
	"fmt"
	"slices"

	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"sluice/router/admin"
	"sluice/router/worker"
)

const drainLong = `Stops a running router from sending new requests to a worker. Requests in flight continue, and its
streams move to other workers where they can (docs/migration.md). It warns if no other ready worker
has the same role and model. sluice undrain ends it. It lasts over sluice restart, but not over a
stop and start of the router.`

const drainExample = `
  sluice drain decode-3
  sluice drain --admin 127.0.0.1:9902 --yes decode-3    one of several routers, without a question
  sluice workers                                        shows when it has no more requests`

const undrainLong = `Allows a running router to send requests to a drained worker again.`

const undrainExample = `
  sluice undrain decode-3`

// drainCommand returns the command drain, or undrain if on is false.
func drainCommand(on bool) *cobra.Command {
	var target routerFlags
	var asJSON bool
	c := cobra.Command{
		Use: "drain [flags] WORKER", GroupID: groupOperate, Short: "send no new requests to a worker", Long: drainLong, Example: drainExample,
		Args: oneArg("worker"),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
			return target.completeWorkers(cmd, args, func(w *admin.Worker) bool { return (w.State == "draining") != on })
		},
	}
	if !on {
		c.Use, c.Short, c.Long, c.Example = "undrain [flags] WORKER", "end the drain of a worker", undrainLong, undrainExample
	}
	cmd := newCommand(c, "0 done, 1 no router found, not confirmed, or no such worker", func(cmd *cobra.Command, args []string) int {
		return runDrain(cmd, target, args[0], on, asJSON)
	})
	target.addChange(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the worker as JSON")
	return cmd
}

// runDrain starts or ends the drain of a worker and prints its state.
func runDrain(cmd *cobra.Command, target routerFlags, id string, on, asJSON bool) int {
	c, rt := target.connect(cmd)
	if c == nil {
		return 1
	}
	defer c.Close()
	stdout, stderr := cmd.OutOrStdout(), cmd.ErrOrStderr()
	ctx, cancel := context.WithTimeout(cmd.Context(), requestTimeout)
	defer cancel()
	drained, all, err := findWorker(ctx, c, id)
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", cmd.CommandPath(), err)
		return 1
	}
	if models := modelsWithoutOther(drained, all); on && len(models) > 0 {
		effect := "requests that need one will wait for it or be refused"
		if drained.Role == worker.Prefill.String() {
			effect = "decode workers will compute the prompts, or requests be refused if pd.decode_only_fallback is off"
		}
		fmt.Fprintf(stderr, "Warning: no other ready worker is %s for %s; %s\n", drained.Role, english.WordSeries(models, "and"), effect)
	}
	change := fmt.Sprintf("Draining worker %s of", id)
	if !on {
		change = fmt.Sprintf("Ending the drain of worker %s of", id)
	}
	if !target.confirm(cmd, rt, change) {
		return 1
	}
	ctx, cancelChange := context.WithTimeout(cmd.Context(), requestTimeout) // the answer may have taken a while
	defer cancelChange()
	w, err := c.Drain(ctx, id, on)
	switch {
	case err != nil:
	case asJSON:
		err = encodeJSON(stdout, w)
	default:
		requests := int64(0)
		for i := range w.Ranks {
			requests += w.Ranks[i].Requests
		}
		_, err = fmt.Fprintf(stdout, "worker %s is %s, with %s in flight\n", w.ID, w.State, english.Plural(int(requests), "request", ""))
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", cmd.CommandPath(), err)
		return 1
	}
	return 0
}

// modelsWithoutOther returns the models of a worker that no other ready worker serves in its role. An
// aggregated worker has every role.
func modelsWithoutOther(w *admin.Worker, all []admin.Worker) (models []string) {
	aggregated := worker.Aggregated.String()
	for _, model := range w.Models {
		if !slices.ContainsFunc(all, func(other admin.Worker) bool {
			return other.ID != w.ID && other.State == worker.Ready.String() && (other.Role == w.Role || other.Role == aggregated) && slices.Contains(other.Models, model)
		}) {
			models = append(models, model)
		}
	}
	return models
}
