//go:build mandoc

package main

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"
)

// The command man exists in builds with the tag mandoc only, which scripts/packages.sh makes, so that
// the Markdown libraries of cobra/doc are not part of the binary.
func init() { extraCommands = append(extraCommands, manCommand) }

func manCommand() *cobra.Command {
	return newCommand(cobra.Command{
		Use: "man FOLDER", GroupID: groupOther, Short: "write the man pages", Hidden: true, Example: "  sluice man build/man",
		Args: oneArg("folder"),
	}, "0 written, 1 not written", func(cmd *cobra.Command, args []string) int {
		if err := writeManPages(cmd.Root(), args[0]); err != nil {
			fmt.Fprintln(cmd.ErrOrStderr(), "sluice man:", err)
			return 1
		}
		return 0
	})
}

// writeManPages writes a page for each command that is not hidden. The date is the commit's, or
// SOURCE_DATE_EPOCH.
func writeManPages(root *cobra.Command, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	completeManTexts(root)
	header := &doc.GenManHeader{Section: "1", Source: "Sluice " + version, Manual: "Sluice"}
	if t, err := time.Parse(time.RFC3339, date); err == nil {
		header.Date = &t
	}
	return doc.GenManTree(root, header, dir)
}

// completeManTexts adds what cobra/doc does not print to the descriptions: the notes, and the list of
// commands. It replaces the ellipsis, which troff does not know.
func completeManTexts(cmd *cobra.Command) {
	cmd.DisableAutoGenTag = true
	var more strings.Builder
	for line := range strings.Lines(cmd.Annotations[notes]) {
		// A line about a key: its form, spaces, its description.
		if key, text, found := strings.Cut(strings.TrimSpace(line), "  "); found && strings.HasPrefix(line, "  ") {
			fmt.Fprintf(&more, "\n\n**%s** %s", key, strings.TrimSpace(text))
		} else {
			more.WriteString("\n\n" + strings.TrimSpace(line))
		}
	}
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			fmt.Fprintf(&more, "\n\n**%s** %s", c.CommandPath(), c.Short)
		}
		completeManTexts(c)
	}
	cmd.Long += more.String()
	cmd.Long, cmd.Example = asciiDots(cmd.Long), asciiDots(cmd.Example)
	cmd.Flags().VisitAll(func(f *pflag.Flag) { f.Usage = asciiDots(f.Usage) })
}

func asciiDots(s string) string { return strings.ReplaceAll(s, "…", "...") }
