package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"sluice/router/admin"
)

const requestsLong = `Prints the requests of a running router that are in flight, and the latest that have ended, newest
first. A request appears when its first worker is chosen. The columns are those of its last
attempt; sluice explain shows all of one request. The router keeps the last 10,000
(schedule.explain).`

const requestsExample = `
  sluice requests
  sluice requests --in-flight
  sluice requests --limit 500 --json | jq '.requests[] | select(.status >= 500)'`

// maxRequests is the largest number of requests that the admin API returns.
const maxRequests = 500

func requestsCommand() *cobra.Command {
	var target routerFlags
	var asJSON, inFlight bool
	var limit int
	cmd := newCommand(cobra.Command{
		Use: "requests [flags]", GroupID: groupOperate, Short: "list requests in flight and the latest", Long: requestsLong, Example: requestsExample,
	}, "0 printed, 1 no router found", func(cmd *cobra.Command, _ []string) int {
		if limit < 1 || limit > maxRequests {
			fmt.Fprintf(cmd.ErrOrStderr(), "sluice requests: --limit %d; want 1 to %d\n", limit, maxRequests)
			return 2
		}
		ask := limit
		if inFlight {
			ask = maxRequests
		}
		return withRouter(cmd, &target, func(ctx context.Context, c *admin.Client) error {
			requests, err := c.Requests(ctx, ask)
			if err != nil {
				return err
			}
			requests = inFlightFirst(requests)
			if inFlight {
				if i := slices.IndexFunc(requests, func(r admin.Request) bool { return r.Done }); i >= 0 {
					requests = requests[:i]
				}
			}
			requests = requests[:min(len(requests), limit)]
			if asJSON {
				return encodeJSON(cmd.OutOrStdout(), map[string]any{"requests": requests})
			}
			writeRequests(cmd.OutOrStdout(), requests, time.Now(), 0)
			return nil
		})
	})
	target.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON, as GET /admin/v1/requests does")
	cmd.Flags().BoolVar(&inFlight, "in-flight", false, "only requests in flight")
	cmd.Flags().IntVar(&limit, "limit", 30, "maximum `NUMBER` of requests, 1 to 500")
	return cmd
}

// inFlightFirst moves the requests that have not ended to the front.
func inFlightFirst(requests []admin.Request) []admin.Request {
	slices.SortStableFunc(requests, func(a, b admin.Request) int {
		switch {
		case a.Done == b.Done:
			return 0
		case b.Done:
			return -1
		}
		return 1
	})
	return requests
}

// writeRequests prints a table, with names of ranks of at most so many characters; 0: of any length.
func writeRequests(w io.Writer, requests []admin.Request, now time.Time, name int) {
	if len(requests) == 0 {
		fmt.Fprintln(w, "no requests")
		return
	}
	var b bytes.Buffer
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "AGE\tSTATUS\tTTFT\tTOTAL\tPROMPT\tCACHED\tOUTPUT\tATTEMPTS\tPREFILL\tDECODE\tREQUEST")
	for i := range requests {
		r := &requests[i]
		status, ttft, total, cached := "running", "-", "-", fmt.Sprintf("~%d", r.Predicted)
		if r.Done {
			status, total = fmt.Sprint(r.Status), millis(msDuration(r.TotalMS))
			if r.Reason != "" {
				status += " " + r.Reason
			}
			if r.Reported >= 0 {
				cached = fmt.Sprint(r.Reported)
			}
		}
		if r.TTFTMS > 0 {
			ttft = millis(msDuration(r.TTFTMS))
		}
		prefill, decode := r.Prefill, r.Decode
		if r.Whole != "" {
			prefill, decode = "-", r.Whole
		}
		fmt.Fprintf(t, "%v\t%s\t%s\t%s\t%d\t%s\t%s\t%d\t%s\t%s\t%s\n", now.Sub(time.UnixMilli(r.At)).Truncate(100*time.Millisecond), oneLine(status), ttft, total,
			r.PromptTokens, cached, reported(int64(r.OutputTokens)), r.Attempts, clip(dash(prefill), name), clip(dash(decode), name), oneLine(r.ID))
	}
	t.Flush()
	for line := range strings.Lines(b.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

func msDuration(ms float64) time.Duration { return time.Duration(ms * float64(time.Millisecond)) }

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
