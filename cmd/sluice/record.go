package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"github.com/dustin/go-humanize"

	"sluice/router/admin"
	"sluice/router/config"
	"sluice/router/kvindex"
	"sluice/router/recording"
	"sluice/router/worker"
)

// newRecorder makes the recorder, which costs next to nothing while nobody
// records.
func (r *router) newRecorder() *recording.Recorder {
	s := r.cfg.Schedule
	rec := recording.New(recording.Options{
		Policy: s.Policy, Weights: weightsOf(&s), Log: r.log,
		Ranks: r.allRanks, Contents: r.exportRank,
	})
	r.metrics.GaugeFunc(func() float64 { n, _, _ := rec.Counts(); return float64(n) }, "sluice_record_entries_total")
	r.metrics.GaugeFunc(func() float64 { _, n, _ := rec.Counts(); return float64(n) }, "sluice_record_dropped_total")
	r.metrics.GaugeFunc(func() float64 { _, _, n := rec.Counts(); return float64(n) }, "sluice_record_bytes_total")
	r.metrics.GaugeFunc(func() float64 {
		if rec.Active() {
			return 1
		}
		return 0
	}, "sluice_record_active")
	return rec
}

// exportRank tells what the indexes hold of a rank.
func (r *router) exportRank(rank *worker.Rank, yield func(exact bool, x *kvindex.Exported) bool) {
	more := true
	emit := func(exact bool) func(x *kvindex.Exported) bool {
		return func(x *kvindex.Exported) bool {
			more = yield(exact, x)
			return more
		}
	}
	if index, ok := r.index.(kvindex.Exporter); ok {
		index.Export(rank.Slot, emit(true))
	}
	if more {
		r.approx.Export(rank.Slot, emit(false))
	}
}

// weightsOf is every number of the scheduler's configuration by its name there.
func weightsOf(s *config.Schedule) map[string]float64 {
	all := make(map[string]float64)
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		if v.Field(i).Kind() == reflect.Float64 {
			all[v.Type().Field(i).Tag.Get("yaml")] = v.Field(i).Float()
		}
	}
	return all
}

// startRecording records to record.dir, where that is set.
func (r *router) startRecording() error {
	c := r.cfg.Record
	if c.Dir == "" {
		return nil
	}
	err := r.recorder.RunForever(func() (recording.Sink, error) {
		return recording.NewFiles(recording.FilesOptions{Dir: c.Dir, MaxFile: c.MaxFile, MaxTotal: c.MaxTotal})
	}, recordAgain)
	if err != nil {
		return fmt.Errorf("record.dir: %w", err)
	}
	return nil
}

// recordAgain is how long a recording that has ended by itself, as on a full disk, is
// waited with before the next is tried.
const recordAgain = time.Minute

const recordHelp = `Usage: sluice record [flags]

Writes what a running router sees and does to files: every change that KV events
make to the index, every choice, every outcome. Prompts are not recorded, only
hashes of their blocks; request ids are hashed as well. It ends by Ctrl-C or after
--for; the router does not wait for it, what cannot be written in time is dropped
and counted in the file. The router must run on this machine, under this user,
with its admin listener on. To record all the time, set record.dir in the
router's configuration instead.

Flags:
`

const recordExamples = `
Examples:
  sluice record --for 10m                     ten minutes into the current folder
  sluice record --out /var/tmp/rec --max-total 10GiB
  sluice replay /var/tmp/rec/*.rec            what other weights would have done
`

// runRecord records until ctx ends. Exit codes: 0 recorded, 1 not, or not to the
// end, 2 called wrongly.
func runRecord(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice record", flag.ContinueOnError)
	fs.SetOutput(stderr)
	addr := fs.String("admin", "", "admin `address` of the router [the only one that runs]")
	runtime := fs.String("runtime-file", "", "the router's runtime `file` [found by --admin]")
	out := fs.String("out", ".", "`folder` for the files, made where need be")
	how := fs.Duration("for", 0, "end after this `time` [until Ctrl-C]")
	maxFile, maxTotal := bytesFlag(64<<20), bytesFlag(1<<30)
	fs.Var(&maxFile, "max-file", "begin the next file after about so many `bytes`")
	fs.Var(&maxTotal, "max-total", "delete the oldest recordings in the folder over so many `bytes`")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), recordHelp)
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), recordExamples)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	rt, err := findRouter(*addr, *runtime)
	if err != nil {
		printNotFound(stderr, "record", *addr, "", err)
		return 1
	}
	files, err := recording.NewFiles(recording.FilesOptions{Dir: *out, MaxFile: int64(maxFile), MaxTotal: int64(maxTotal)})
	if err != nil {
		fmt.Fprintln(stderr, "sluice record:", err)
		return 1
	}
	if *how > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, *how)
		defer cancel()
	}
	began := time.Now()
	err = recordTo(ctx, rt, files)
	if closed := files.Close(); err == nil {
		err = closed
	}
	total := int64(0)
	for _, name := range files.Names() {
		if info, err := os.Stat(name); err == nil {
			total += info.Size()
			fmt.Fprintln(stdout, filepath.Clean(name))
		}
	}
	fmt.Fprintf(stderr, "%s in %v\n", humanize.IBytes(uint64(total)), time.Since(began).Round(time.Second))
	if err != nil {
		fmt.Fprintln(stderr, "sluice record:", err)
		return 1
	}
	return 0
}

func recordTo(ctx context.Context, rt admin.Runtime, files *recording.Files) error {
	c := admin.NewClient(rt)
	defer c.Close()
	stream, err := c.Record(ctx)
	if err != nil {
		return err
	}
	defer stream.Close()
	err = recording.Copy(files, stream)
	switch {
	case ctx.Err() != nil:
		return nil // as asked; what was cut off with the connection is no loss
	case err != nil:
		return fmt.Errorf("the recording broke off: %w", err)
	}
	return errors.New("the router ended the recording: it has ended itself, or this command did not keep up; its log says which")
}

// bytesFlag is a number of bytes, such as 64MiB.
type bytesFlag int64

func (b *bytesFlag) String() string { return humanize.IBytes(uint64(*b)) }

func (b *bytesFlag) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n < 1<<20 || n > 1<<50 {
		return fmt.Errorf("want a number of bytes from 1MiB on, such as 64MiB")
	}
	*b = bytesFlag(n)
	return nil
}
