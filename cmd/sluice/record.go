package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/dustin/go-humanize"

	"sluice/router/admin"
	"sluice/router/recording"
)

const recordHelp = `Usage: sluice record [flags]

Writes what a running router sees and does to files: every change that KV events
make to the index, every choice, every outcome. Prompts are not recorded, only
hashes of their blocks; request ids are hashed as well. It ends by Ctrl-C or after
--for; the router does not wait for it, what cannot be written in time is dropped
and counted in the file. The router must run on this machine, under this user,
with its admin listener on. To record all the time, set recording.dir in the
router's configuration instead.

Flags:
`

const recordExamples = `
Examples:
  sluice record --duration 10m                ten minutes into the current folder
  sluice record --out /var/tmp/rec --max-total 10GiB
  sluice replay /var/tmp/rec/*.rec            what other weights would have done
`

// runRecord records until ctx ends or --duration has passed. Exit codes: 0 recorded, 1 the
// recording failed or ended early, 2 usage error.
func runRecord(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice record", flag.ContinueOnError)
	fs.SetOutput(stderr)
	addr := fs.String("admin", "", "admin `address` of the router [the only one that runs]")
	runtime := fs.String("runtime-file", "", "the router's runtime `file` [found by --admin]")
	out := fs.String("out", ".", "`folder` for the files; created if it does not exist")
	how := fs.Duration("duration", 0, "end after this `time` [until Ctrl-C]")
	maxFile, maxTotal := bytesFlag(64<<20), bytesFlag(1<<30)
	fs.Var(&maxFile, "max-file", "size at which the next file begins, in `bytes`")
	fs.Var(&maxTotal, "max-total", "limit of all recordings in the folder, in `bytes`; the oldest are deleted")
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
		return nil // the user ended it; the partial entry at the end does not matter
	case err != nil:
		return fmt.Errorf("the recording broke off: %w", err)
	}
	return errors.New("the router ended the recording: the router ended, or this command did not keep up; its log says which")
}

// bytesFlag is a flag value: a number of bytes, such as 64MiB.
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
