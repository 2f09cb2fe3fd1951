package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"sluice/router/admin"
	"sluice/router/worker"
)

const topLong = `Shows a running router, refreshed every --interval: rates and time to first token of the last ten
seconds, legs in flight, the workers, and the requests in flight and the latest. q or Ctrl-C ends
it. If the terminal has not enough rows for all ranks, those that are not ready are first, then the
busiest. With --once, or if standard output is not a terminal, it prints one whole view and ends.`

const topExample = `
  sluice top
  sluice top --interval 5s
  sluice top --once`

// minTopInterval keeps the command from loading the router.
const minTopInterval = 200 * time.Millisecond

func topCommand() *cobra.Command {
	var target routerFlags
	var once, asJSON bool
	var interval time.Duration
	cmd := newCommand(cobra.Command{
		Use: "top [flags]", GroupID: groupOperate, Short: "show a running router, refreshed every second", Long: topLong, Example: topExample,
	}, "0 ended, 1 no router found or it ended", func(cmd *cobra.Command, _ []string) int {
		if interval < minTopInterval {
			fmt.Fprintf(cmd.ErrOrStderr(), "sluice top: --interval %v; want %v or more\n", interval, minTopInterval)
			return 2
		}
		if asJSON {
			return withRouter(cmd, &target, func(ctx context.Context, c *admin.Client) error {
				v, err := readTop(ctx, c)
				if err != nil {
					return err
				}
				return encodeJSON(cmd.OutOrStdout(), v)
			})
		}
		return runTop(cmd, &target, once, interval)
	})
	target.add(cmd)
	cmd.Flags().BoolVar(&once, "once", false, "print one view and end")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one view as JSON and end")
	cmd.Flags().DurationVar(&interval, "interval", time.Second, "`DURATION` between refreshes, 200ms or more")
	return cmd
}

func runTop(cmd *cobra.Command, target *routerFlags, once bool, interval time.Duration) int {
	c, rt := target.connect(cmd)
	if c == nil {
		return 1
	}
	defer c.Close()
	stdout := cmd.OutOrStdout()
	screen, isFile := stdout.(*os.File)
	var err error
	if once || !isFile || !isatty(screen) {
		var view bytes.Buffer
		if err = writeTop(cmd.Context(), &view, c, rt, 0); err == nil {
			_, err = stdout.Write(view.Bytes())
		}
	} else {
		err = showTop(cmd, screen, interval, func(ctx context.Context, w io.Writer, rows int) error {
			return writeTop(ctx, w, c, rt, rows)
		})
	}
	if err != nil {
		fmt.Fprintln(cmd.ErrOrStderr(), "sluice top:", err)
		return 1
	}
	return 0
}

const (
	// The alternate screen, without a cursor and without the wrapping of lines: wide characters take more columns
	// than frame counts.
	enterScreen = "\x1b[?1049h\x1b[?7l\x1b[?25l"
	leaveScreen = "\x1b[?25h\x1b[?7h\x1b[?1049l"
	homeScreen  = "\x1b[H"
	clearLine   = "\x1b[K"
	clearBelow  = "\x1b[J"
)

// showTop draws the view on a terminal until q is pressed or the command's context ends. It returns the
// error of a view.
func showTop(cmd *cobra.Command, screen *os.File, interval time.Duration, view func(ctx context.Context, w io.Writer, rows int) error) error {
	ctx, quit := context.WithCancel(cmd.Context())
	defer quit()
	if keys, isFile := cmd.InOrStdin().(*os.File); isFile && isatty(keys) {
		restore, err := rawMode(keys)
		if err != nil {
			return fmt.Errorf("cannot set the terminal's mode: %w", err)
		}
		defer restore()
		ended := make(chan struct{})
		defer func() { quit(); <-ended }()
		go func() {
			defer close(ended)
			defer quit()
			quitOnKey(ctx, keys)
		}()
	}
	fmt.Fprint(screen, enterScreen)
	defer fmt.Fprint(screen, leaveScreen)
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		columns, rows := terminalSize(screen)
		var b bytes.Buffer
		if err := view(ctx, &b, rows); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		if _, err := screen.WriteString(frame(b.String(), columns, rows)); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// quitOnKey returns when q is pressed, standard input fails, or ctx ends. Reads of keys return every
// 100 ms (rawMode).
func quitOnKey(ctx context.Context, keys *os.File) {
	var key [16]byte
	for ctx.Err() == nil {
		n, err := keys.Read(key[:])
		if err != nil && err != io.EOF { // EOF: no key was pressed
			return
		}
		if bytes.ContainsAny(key[:n], "qQ\x03") {
			return
		}
	}
}

// frame returns what draws text from the upper left corner, cut to the terminal's size.
func frame(text string, columns, rows int) string {
	var b strings.Builder
	b.WriteString(homeScreen)
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i, line := range lines[:min(len(lines), rows)] {
		if i > 0 {
			b.WriteString("\r\n")
		}
		if r := []rune(line); len(r) > columns {
			line = string(r[:columns])
		}
		b.WriteString(clearLine + line) // in this order: after the last column, clearLine would erase it
	}
	b.WriteString(clearBelow)
	return b.String()
}

// topView is what top shows, and the output of top --json.
type topView struct {
	Router   *admin.Identity `json:"router,omitempty"` // nil for a router of an earlier release
	Stats    *admin.Stats    `json:"stats"`
	Workers  []admin.Worker  `json:"workers"`
	Requests []admin.Request `json:"requests"` // those in flight first
}

func readTop(ctx context.Context, c *admin.Client) (*topView, error) {
	var v topView
	var err error
	if v.Stats, err = c.Stats(ctx, time.Now()); err != nil {
		return nil, err
	}
	if v.Workers, err = c.Workers(ctx); err != nil {
		return nil, err
	}
	if v.Requests, err = c.Requests(ctx, maxRequests); err != nil {
		return nil, err
	}
	v.Requests = inFlightFirst(v.Requests)
	if id, err := c.Identity(ctx); err == nil {
		v.Router = id
	}
	return &v, nil
}

// writeTop writes one view for a screen of so many rows; 0: without a limit.
func writeTop(ctx context.Context, w io.Writer, c *admin.Client, rt admin.Runtime, rows int) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	v, err := readTop(ctx, c)
	if err != nil {
		return err
	}
	router, stats := rt.Address, v.Stats
	if v.Router != nil {
		router = describeIdentity(v.Router)
	}
	fmt.Fprintf(w, "sluice top  %s  policy %s\n\n", router, stats.Name)
	now := &stats.Now
	fmt.Fprintf(w, "%.1f requests/s  %s output tokens/s  %.1f refused/s  %s\n", now.RequestRate, humanize.Comma(int64(now.TokenRate)), now.RefusedRate, plural(now.Connections, "connection"))
	n := legsInFlight(v.Workers)
	fmt.Fprintf(w, "in flight: %d prefill  %d decode  %d aggregated\n", n.Prefill, n.Decode, n.Aggregated)
	fmt.Fprintf(w, "first token p50 %s  p99 %s   cached prompt tokens: predicted %s  reported %s\n", optional(now.TTFTP50, "%.0f ms", 1), optional(now.TTFTP99, "%.0f ms", 1),
		optional(now.Predicted, "%.0f %%", 100), optional(now.Actual, "%.0f %%", 100))
	fmt.Fprintf(w, "since the start: %s  %s refused  %s\n\n", plural(int64(stats.Total.Responses), "response"), humanize.Comma(int64(stats.Total.Refused)), plural(int64(stats.Total.Retries), "retry"))
	writeTopTables(w, v, rows)
	return nil
}

// legsInFlight sums what the table of workers shows: a count of another moment would disagree with it.
func legsInFlight(workers []admin.Worker) (n admin.InFlight) {
	for i := range workers {
		for _, r := range workers[i].Ranks {
			switch workers[i].Role {
			case worker.Prefill.String():
				n.Prefill += r.Requests
			case worker.Decode.String():
				n.Decode += r.Requests
			default:
				n.Aggregated += r.Requests
			}
		}
	}
	return n
}

// plural returns n with its noun, such as "1 retry" and "1,200 retries".
func plural(n int64, noun string) string {
	return humanize.Comma(n) + " " + english.PluralWord(int(n), noun, "")
}

// topHead is the number of rows of a view without its ranks and requests.
const topHead = 10

// Longest names in a view that must fit a screen. Without a bound, one long name would move the columns of all
// rows off the screen.
const (
	topName   = 28
	topModels = 24
)

// writeTopTables writes the workers and the requests of a view. If they do not all fit into the rows of the
// screen, the ranks get half of them, and more if there are fewer requests.
func writeTopTables(w io.Writer, v *topView, rows int) {
	if rows <= 0 {
		writeWorkers(w, v.Workers)
		fmt.Fprintln(w)
		writeRequests(w, v.Requests, time.Now(), 0)
		return
	}
	ranks, hidden := rankRows(v.Workers), 0
	space := max(rows-topHead, 4)
	if most := max(space/2, space-len(v.Requests)); len(ranks) > most {
		slices.SortStableFunc(ranks, compareAttention)
		hidden = len(ranks) - (most - 1) // the last row says how many are left out
		ranks = ranks[:most-1]
	}
	writeRanks(w, ranks, topName, topModels)
	if hidden > 0 {
		fmt.Fprintf(w, "… and %s more; sluice workers lists all\n", humanize.Comma(int64(hidden)))
	}
	fmt.Fprintln(w)
	writeRequests(w, v.Requests[:min(len(v.Requests), rows)], time.Now(), topName)
}

// compareAttention orders ranks by how much they need an operator's attention: those of workers that are not
// ready, those with a breaker that is not closed, then the busiest.
func compareAttention(a, b rankRow) int {
	need := func(r rankRow) int {
		switch {
		case r.worker.State != "ready":
			return 0
		case r.rank.Breaker != "closed":
			return 1
		}
		return 2
	}
	load := func(r rankRow) int64 { return r.rank.Requests + max(r.rank.Waiting, 0) }
	return cmp.Or(cmp.Compare(need(a), need(b)), cmp.Compare(load(b), load(a)))
}

// optional prints a figure that is absent without an observation.
func optional(v *float64, format string, scale float64) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf(format, *v*scale)
}
