package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"sluice/router/admin"
	"sluice/router/recording"
)

const recordLong = `Writes what a running router sees and does to files: every change that KV events make to the
index, every choice and every outcome. Prompts are not recorded, only hashes of their blocks;
request ids are hashed as well. It ends at Ctrl-C or after --duration. The router does not wait for
the command: it drops what cannot be written in time and counts it in the file. To record
permanently, set recording.dir in the router's configuration.`

const recordExamples = `
  sluice record --duration 10m                ten minutes, into the current folder
  sluice record --out /var/tmp/rec --max-total 10GiB
  sluice replay /var/tmp/rec/*.rec            the effect of other weights`

func recordCommand() *cobra.Command {
	var target routerFlags
	var out string
	var asJSON bool
	var duration time.Duration
	maxFile, maxTotal := bytesFlag(64<<20), bytesFlag(1<<30)
	cmd := newCommand(cobra.Command{
		Use: "record [flags]", GroupID: groupOperate, Short: "write a running router's events, choices and outcomes to files", Long: recordLong, Example: recordExamples,
	}, "0 recorded, 1 the recording failed or ended early", func(cmd *cobra.Command, _ []string) int {
		options := recording.FilesOptions{Dir: out, MaxFile: int64(maxFile), MaxTotal: int64(maxTotal)}
		return runRecord(cmd.Context(), target, options, duration, asJSON, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	target.add(cmd)
	cmd.Flags().StringVar(&out, "out", ".", "`FOLDER` for the files; created if it does not exist")
	cmd.Flags().DurationVar(&duration, "duration", 0, "end after this `TIME` (default: at Ctrl-C)")
	cmd.Flags().Var(&maxFile, "max-file", "`SIZE` at which the next file begins")
	cmd.Flags().Var(&maxTotal, "max-total", "`SIZE` limit of all recordings in the folder; the oldest are deleted")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the files, their size and the time as JSON at the end")
	return cmd
}

// runRecord records until ctx ends or the duration, if it is not 0, has passed.
func runRecord(ctx context.Context, target routerFlags, options recording.FilesOptions, duration time.Duration, asJSON bool, stdout, stderr io.Writer) int {
	rt, err := target.find()
	if err != nil {
		printNotFound(stderr, "record", target.addr, "", err)
		return 1
	}
	files, err := recording.NewFiles(options)
	if err != nil {
		fmt.Fprintln(stderr, "sluice record:", err)
		return 1
	}
	if duration > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, duration)
		defer cancel()
	}
	began := time.Now()
	err = recordTo(ctx, rt, files)
	if closed := files.Close(); err == nil {
		err = closed
	}
	result := recorded{Files: []string{}, Seconds: time.Since(began).Seconds()}
	for _, name := range files.Names() {
		if info, err := os.Stat(name); err == nil {
			result.Bytes += info.Size()
			result.Files = append(result.Files, filepath.Clean(name))
		}
	}
	if printed := result.print(asJSON, stdout, stderr); err == nil {
		err = printed
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice record:", err)
		return 1
	}
	return 0
}

// recorded is what the command has written.
type recorded struct {
	Files   []string `json:"files"`
	Bytes   int64    `json:"bytes"`
	Seconds float64  `json:"seconds"`
}

func (r *recorded) print(asJSON bool, stdout, stderr io.Writer) error {
	if asJSON {
		return encodeJSON(stdout, r)
	}
	for _, name := range r.Files {
		fmt.Fprintln(stdout, name)
	}
	fmt.Fprintf(stderr, "%s in %v\n", humanize.IBytes(uint64(r.Bytes)), time.Duration(r.Seconds*float64(time.Second)).Round(time.Second))
	return nil
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

func (b *bytesFlag) Type() string { return "size" }

func (b *bytesFlag) Set(s string) error {
	n, err := humanize.ParseBytes(s)
	if err != nil || n < 1<<20 || n > 1<<50 {
		return fmt.Errorf("want a number of bytes from 1MiB on, such as 64MiB")
	}
	*b = bytesFlag(n)
	return nil
}
