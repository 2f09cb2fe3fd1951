package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"sluice/dataplane/jsonscan"
	"sluice/router/admin"
	"sluice/router/pd"
	"sluice/router/schedule"
)

const explainLong = `Shows why a request was sent to its workers: every candidate with the terms of its cost in
estimated milliseconds, the choice, retries and the outcome. REQUEST_ID is the X-Request-Id of the
response. The router keeps the records of the last 10,000 requests (schedule.explain).`

const explainExamples = `
  sluice explain 7f3c9a4e0b1d
  sluice explain --json 7f3c9a4e0b1d | jq .decisions[0].chosen
  sluice explain --admin 127.0.0.1:9902 7f3c9a4e0b1d   one of several routers`

func explainCommand() *cobra.Command {
	var target routerFlags
	var asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "explain [flags] REQUEST_ID", GroupID: groupOperate, Short: "show why a request was sent to its workers", Long: explainLong, Example: explainExamples,
		Args: oneArg("request id"),
	}, "0 printed, 1 no router found or the request is unknown", func(cmd *cobra.Command, args []string) int {
		return runExplain(cmd.Context(), target, args[0], asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	target.add(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the record as JSON")
	return cmd
}

// runExplain prints the explain record of one request.
func runExplain(ctx context.Context, target routerFlags, id string, asJSON bool, stdout, stderr io.Writer) int {
	rt, err := target.find()
	if err != nil {
		printNotFound(stderr, "explain", target.addr, "", err)
		return 1
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	c := admin.NewClient(rt)
	defer c.Close()
	rec, body, err := c.Explain(ctx, id)
	if err != nil {
		fmt.Fprintln(stderr, "sluice explain:", err)
		return 1
	}
	if asJSON {
		var b bytes.Buffer
		if json.Indent(&b, bytes.TrimSpace(body), "", "  ") != nil {
			b.Write(body)
		}
		fmt.Fprintf(stdout, "%s\n", jsonscan.EscapeUnprintable(b.Bytes()))
		return 0
	}
	writeRecord(stdout, rec, c.Timeline(ctx, id))
	return 0
}

// writeRecord prints a record. Text that clients and engines can influence is printed without characters that
// a terminal interprets. t is the request's timeline, nil if there is none.
func writeRecord(w io.Writer, rec *schedule.Record, t *admin.Timeline) {
	fmt.Fprintf(w, "Request %s, %s, policy %s\n", oneLine(rec.RequestID), rec.Started.Local().Format("2006-01-02 15:04:05.000"), rec.Policy)
	writeClass(w, rec, t)
	for i := range rec.Joint {
		writePair(w, &rec.Joint[i])
	}
	for i := range rec.Decisions {
		writeDecision(w, &rec.Decisions[i], exclusionReasons(rec, i))
	}
	if rec.Dropped > 0 {
		fmt.Fprintf(w, "\n%d more decisions were not kept.\n", rec.Dropped)
	}
	if len(rec.Notes) > 0 {
		fmt.Fprint(w, "\nOn the way:\n")
		for _, n := range rec.Notes {
			fmt.Fprintf(w, "  %8.1f ms  %s\n", n.AtMS, oneLine(n.Text))
		}
	}
	writeOutcome(w, rec.Outcome)
	for i := range rec.Earlier {
		fmt.Fprint(w, "\nAn earlier request of the same id:\n")
		writeRecord(w, &rec.Earlier[i], t)
	}
}

// writeClass prints the admission class and tenant of the request, and where it began to wait. Records have
// none of them, because a note of each request would cost every request; timelines have.
func writeClass(w io.Writer, rec *schedule.Record, t *admin.Timeline) {
	if t == nil || t.Class == "" {
		return
	}
	// The id may be that of several requests, of which t is one.
	const rounding = time.Millisecond
	ended := t.Received.Add(time.Duration(t.TotalMS * float64(time.Millisecond)))
	if rec.Started.Before(t.Received.Add(-rounding)) || rec.Started.After(ended.Add(rounding)) {
		return
	}
	fmt.Fprintf(w, "Class %s", oneLine(t.Class))
	if t.Tenant != "" {
		fmt.Fprintf(w, ", tenant %s", oneLine(t.Tenant))
	}
	position := 0
	for i := range t.Spans {
		position = max(position, t.Spans[i].Position)
	}
	if position > 0 {
		fmt.Fprintf(w, "; it began to wait at place %d among the requests of its class and of higher ones", position)
	} else {
		fmt.Fprint(w, "; it did not wait for a rank")
	}
	fmt.Fprintln(w)
}

// exclusionReasons says why decision i had excluded ranks, by the notes of the record: a note is added for each
// rank on which a leg has failed, and before a choice that leaves ranks out because of targets. What they do not
// explain is left out for its load or state.
func exclusionReasons(rec *schedule.Record, i int) string {
	d := &rec.Decisions[i]
	since := -1.0 // the choice before; the two of a joint choice are made at the same time
	for j := i - 1; j >= 0 && since < 0; j-- {
		if at := rec.Decisions[j].AtMS; at < d.AtMS {
			since = at
		}
	}
	failed, targets := map[string]bool{}, 0
	for _, n := range rec.Notes {
		if n.AtMS > d.AtMS {
			continue
		}
		if count, _, found := strings.Cut(n.Text, " of "); found && n.AtMS > since && strings.Contains(n.Text, pd.LeftOutForTargets) {
			targets, _ = strconv.Atoi(count)
			continue
		}
		if what, _, found := strings.Cut(n.Text, " failed: "); found {
			if _, rank, ofLeg := strings.Cut(what, " on "); ofLeg && !strings.Contains(rank, " ") {
				failed[rank] = true
			}
		}
	}
	var reasons []string
	if len(failed) > 0 {
		reasons = append(reasons, "failed for this request")
	}
	if targets > 0 {
		reasons = append(reasons, "expected to miss more of its targets")
	}
	if len(failed)+targets < d.Excluded {
		reasons = append(reasons, "at a limit, without capacity, or not ready")
	}
	return strings.Join(reasons, "; ")
}

// costTerms are the columns of the candidates' table. Columns that are 0 for every candidate
// are omitted.
var costTerms = []struct {
	name string
	of   func(*schedule.Terms) float64
}{
	{"prefill", func(t *schedule.Terms) float64 { return t.Prefill }},
	{"transfer", func(t *schedule.Terms) float64 { return t.Transfer }},
	{"queue", func(t *schedule.Terms) float64 { return t.Queue }},
	{"waiting", func(t *schedule.Terms) float64 { return t.Waiting }},
	{"decode", func(t *schedule.Terms) float64 { return t.Decode }},
	{"pressure", func(t *schedule.Terms) float64 { return t.Pressure }},
	{"eviction", func(t *schedule.Terms) float64 { return t.Eviction }},
	{"others", func(t *schedule.Terms) float64 { return t.Others }},
}

// planReasons maps a reason of the scheduler's choice between plans to its explanation.
var planReasons = map[string]string{
	schedule.ReasonFewUncached:   "too few uncached tokens for a hand-over to be worthwhile (pd.local_prefill_tokens)",
	schedule.ReasonFaster:        "the estimated time to the first token is shorter",
	schedule.ReasonUncached:      "enough uncached tokens for a hand-over (pd.local_prefill_tokens)",
	schedule.ReasonPromptUnknown: "the length of the prompt is unknown",
	schedule.ReasonNotConsidered: "the ranks were chosen jointly; prefill on the decode worker was not considered",
}

// writePair prints how the scheduler chose the prefill and decode ranks together, and what the
// alternative would have cost.
func writePair(w io.Writer, p *schedule.JointDecision) {
	why := planReasons[p.Reason]
	if why == "" {
		why = p.Reason
	}
	fmt.Fprintf(w, "\nPlan of attempt %d, at %.1f ms: %s, %s\n", p.Attempt, p.AtMS, p.Plan, why)
	mark := map[bool]string{true: "→", false: " "}
	r := &p.Remote
	fmt.Fprintf(w, "  %s remote: prefill on %s, decode on %s: %.2f ms%s", mark[p.Plan == "remote"], r.Prefill, r.Decode, r.Cost, termList(&r.Terms, r.Handover))
	if r.TransferRate > 0 {
		fmt.Fprintf(w, ", at %.4f ms a token between these two", r.TransferRate)
	}
	fmt.Fprintf(w, "; decode has %d of %d tokens left\n", r.Uncached, p.PromptTokens)
	if l := p.Local; l != nil {
		fmt.Fprintf(w, "  %s local: all on %s: %.2f ms%s; %d of %d tokens left\n", mark[p.Plan == "local"], l.Rank, l.Cost, termList(&l.Terms, 0), l.Uncached, p.PromptTokens)
	}
}

// termList returns the terms that are not 0 as a sum, such as " = prefill 1.00 + queue 2.00".
func termList(t *schedule.Terms, handover float64) string {
	var parts []string
	for _, c := range costTerms {
		if v := c.of(t); v != 0 {
			parts = append(parts, fmt.Sprintf("%s %.2f", c.name, v))
		}
	}
	if handover != 0 {
		parts = append(parts, fmt.Sprintf("hand-over %.2f", handover))
	}
	if len(parts) == 0 {
		return ""
	}
	return " = " + strings.Join(parts, " + ")
}

// idSources are the sources of a prompt's token ids as they are printed.
var idSources = map[string]string{
	"request": " (ids of the request)", "native": " (native ids)", "cache": " (ids of an engine, cached)", "engine": " (ids of an engine)", "text": " (estimated from the text)",
}

// writeDecision prints a choice. excluded says why ranks were excluded.
func writeDecision(w io.Writer, d *schedule.Decision, excluded string) {
	chosen := d.Chosen
	if chosen == "" {
		chosen = "none: no candidate was left"
	}
	fmt.Fprintf(w, "\n%s leg, attempt %d, at %.1f ms: %s\n", strings.ToUpper(d.Leg[:1])+d.Leg[1:], d.Attempt, d.AtMS, chosen)
	fmt.Fprintf(w, "  %s%s, about %d to come; %s", english.Plural(d.PromptTokens, "prompt token", ""), idSources[d.PromptSource], d.OutputTokens, english.Plural(d.Candidates, "candidate", ""))
	if d.Excluded > 0 {
		fmt.Fprintf(w, ", %d excluded (%s)", d.Excluded, excluded)
	}
	if len(d.Shown) < d.Candidates {
		fmt.Fprintf(w, ", the best %d shown", len(d.Shown))
	}
	fmt.Fprintln(w)
	if len(d.Shown) == 0 {
		return
	}
	rows := slices.Clone(d.Shown)
	slices.SortStableFunc(rows, func(a, b schedule.Candidate) int {
		if a.Excluded != b.Excluded {
			if a.Excluded {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.Cost, b.Cost)
	})
	var b bytes.Buffer
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(t, "\trank\tcost ms\t")
	terms := costTerms[:0:0]
	for _, c := range costTerms {
		if slices.ContainsFunc(rows, func(r schedule.Candidate) bool { return c.of(&r.Terms) != 0 }) {
			terms = append(terms, c)
			fmt.Fprintf(t, "= %s\t", c.name)
		}
	}
	fmt.Fprint(t, "cached\tto prefill\tblocks\trequests\twaiting\tevents\t\n")
	for i := range rows {
		writeCandidate(t, &rows[i], terms)
	}
	t.Flush()
	// The tabwriter pads the last cell of each row with spaces.
	for line := range strings.Lines(b.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
	}
}

func writeCandidate(t io.Writer, c *schedule.Candidate, terms []struct {
	name string
	of   func(*schedule.Terms) float64
}) {
	mark := ""
	switch {
	case c.Chosen:
		mark = "→"
	case c.Excluded:
		mark = "×"
	}
	fmt.Fprintf(t, "%s\t%s\t%.2f\t", mark, c.Rank, c.Cost)
	for _, term := range terms {
		fmt.Fprintf(t, "%.2f\t", term.of(&c.Terms))
	}
	cached := fmt.Sprint(c.Cached)
	switch {
	case c.InFlight:
		cached = "+" + cached
	case c.Unknown:
		cached = "?" + cached
	case c.Approx:
		cached = "~" + cached
	}
	waiting := "?"
	if c.Waiting >= 0 {
		waiting = fmt.Sprint(c.Waiting)
	}
	fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%s\t%s\t\n", cached, c.Reserved, c.Blocks, c.Requests, waiting, c.Feed)
}

func writeOutcome(w io.Writer, o *schedule.OutcomeRecord) {
	if o == nil {
		fmt.Fprint(w, "\nIn progress, or its end was not recorded.\n")
		return
	}
	fmt.Fprintf(w, "\nEnded: status %d", o.Status)
	if o.Reason != "" {
		fmt.Fprintf(w, " (%s)", oneLine(o.Reason))
	}
	fmt.Fprintf(w, " after %.1f ms", o.TotalMS)
	if o.TTFTMS > 0 {
		fmt.Fprintf(w, ", first token after %.1f ms", o.TTFTMS)
	}
	if o.PromptTokens > 0 || o.OutputTokens > 0 {
		fmt.Fprintf(w, "; %s prompt %s", reported(int64(o.PromptTokens)), english.PluralWord(o.PromptTokens, "token", ""))
		if o.CachedTokens >= 0 {
			fmt.Fprintf(w, " (%d cached as reported by the engine)", o.CachedTokens)
		}
		fmt.Fprintf(w, ", %s output %s", reported(int64(o.OutputTokens)), english.PluralWord(o.OutputTokens, "token", ""))
	}
	fmt.Fprintln(w, ".")
	writeTransfer(w, o.Transfer)
}

// writeTransfer prints the reported transfer of KV from prefill to decode. It prints nothing
// if no tier was up to report it.
func writeTransfer(w io.Writer, t *schedule.TransferRecord) {
	switch {
	case t == nil:
		return
	case t.State == "unknown":
		fmt.Fprintln(w, "KV transfer: unknown; decode's engine runs no connector, or its report has not come.")
		return
	}
	fmt.Fprintf(w, "KV transfer: %s", t.State)
	if t.AfterMS > 0 {
		fmt.Fprintf(w, " %.1f ms after prefill's answer", t.AfterMS)
	}
	if t.TookMS > 0 {
		fmt.Fprintf(w, "; %s in %.1f ms as reported by the engine, %s/s", humanize.IBytes(uint64(max(t.Bytes, 0))), t.TookMS, humanize.IBytes(uint64(float64(max(t.Bytes, 0))/t.TookMS*1e3)))
	}
	fmt.Fprintln(w, ".")
}
