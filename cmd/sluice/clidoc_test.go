package main

import (
	"fmt"
	"html"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestCLIDoc compares docs/cli.md, the commands with their flags, with the code; -rewrite writes it.
func TestCLIDoc(t *testing.T) {
	const path = "../../docs/cli.md"
	want := cliDoc(newRoot())
	if rewriteDocs() {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if text, err := os.ReadFile(path); err != nil {
		t.Error(err)
	} else if want != string(text) {
		t.Errorf("%s is out of date; run: go test ./cmd/sluice -run TestCLIDoc -rewrite", path)
	}
}

// TestCLIDocHasEveryFlag reads the page as a reader does: below the heading of each command is a row for
// each flag that its help shows.
func TestCLIDocHasEveryFlag(t *testing.T) {
	page := readDoc(t, "docs/cli.md")
	flag := regexp.MustCompile(`(?m)^ +(?:-\w, )?(--[\w-]+)`)
	for _, cmd := range leafCommands(newRoot()) {
		if cmd.Hidden {
			continue
		}
		_, section, found := strings.Cut(page, "\n### "+cmd.CommandPath()+"\n")
		if !found {
			t.Errorf("docs/cli.md has no heading %s", cmd.CommandPath())
			continue
		}
		section, _, _ = strings.Cut(section, "\n## ")
		section, _, _ = strings.Cut(section, "\n### ")
		var help strings.Builder
		printHelp(&help, cmd)
		_, flags, _ := strings.Cut(help.String(), "\nFlags:\n")
		for _, name := range flag.FindAllStringSubmatch(flags, -1) {
			row := regexp.MustCompile("(?m)^\\| (`|<code>)(-\\w, )?" + name[1] + "[ `<]")
			if name[1] != "--help" && !row.MatchString(section) {
				t.Errorf("docs/cli.md: %s has no row of %s", cmd.CommandPath(), name[1])
			}
		}
	}
}

// cliDoc returns the text of docs/cli.md.
func cliDoc(root *cobra.Command) string {
	var b strings.Builder
	b.WriteString(`# Command line

This page describes each command with its flags, as ` + "`sluice COMMAND --help`" + ` does.
[commands.md](commands.md) lists the commands in short and says what they have in common.
The code writes this page (` + "`go test ./cmd/sluice -run TestCLIDoc -rewrite`" + `).

` + "```" + `
sluice serve --help
` + "```" + `

Every command also has ` + "`-h, --help`" + `.
What follows a flag in the tables is its value; a flag without one is a switch.
`)
	described := map[string]string{} // notes: the command that has them
	for _, g := range root.Groups() {
		fmt.Fprintf(&b, "\n## %s\n", strings.TrimSuffix(g.Title, ":"))
		for _, cmd := range leafCommands(root) {
			top := cmd
			for top.Parent() != root {
				top = top.Parent()
			}
			if !cmd.Hidden && top.GroupID == g.ID {
				commandDoc(&b, cmd, described)
			}
		}
	}
	return b.String()
}

func commandDoc(b *strings.Builder, cmd *cobra.Command, described map[string]string) {
	fmt.Fprintf(b, "\n### %s\n\n```\n%s\n```\n\n%s\n", cmd.CommandPath(), cmd.UseLine(), proseDoc(cmd.Long))
	if cmd.Example != "" {
		fmt.Fprintf(b, "\nExamples:\n\n```\n%s\n```\n", dedent(cmd.Example))
	}
	var rows strings.Builder
	cmd.InitDefaultHelpFlag()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		one := pflag.NewFlagSet("", pflag.ContinueOnError)
		one.AddFlag(f)
		name, usage, _ := strings.Cut(strings.TrimSpace(one.FlagUsages()), "   ")
		fmt.Fprintf(&rows, "| %s | %s |\n", codeCell(name), textCell(usage))
	})
	if rows.Len() > 0 {
		fmt.Fprintf(b, "\n| flag | meaning |\n| --- | --- |\n%s", rows.String())
	}
	n := cmd.Annotations[notes]
	if n == "" {
		return
	}
	title, _, _ := strings.Cut(n, "\n")
	if first := described[n]; first != "" {
		title, _, _ = strings.Cut(title, " (")
		fmt.Fprintf(b, "\n%s: see [%s](#%s).\n", title, first, strings.ReplaceAll(first, " ", "-"))
		return
	}
	described[n] = cmd.CommandPath()
	table := false
	for line := range strings.Lines(n) {
		// A line about a key: its form, spaces, its description.
		key, text, found := strings.Cut(strings.TrimSpace(line), "  ")
		switch isKey := found && strings.HasPrefix(line, "  "); {
		case isKey:
			if !table {
				b.WriteString("\n| key | meaning |\n| --- | --- |\n")
			}
			table = true
			fmt.Fprintf(b, "| %s | %s |\n", codeCell(key), textCell(text))
		default:
			if table || line[:len(line)-1] == title {
				b.WriteString("\n")
			}
			table = false
			b.WriteString(proseDoc(line) + "\n")
		}
	}
}

var (
	docPath   = regexp.MustCompile(`docs/([\w-]+\.md)`)
	wordStart = regexp.MustCompile(`(^|\W)_`)
	lineBreak = regexp.MustCompile(`\n\s*`)
)

// proseDoc returns text of the help as Markdown, with links to the pages that it names.
func proseDoc(s string) string {
	s = strings.NewReplacer("<", "&lt;", "*", `\*`).Replace(strings.TrimSpace(s))
	s = wordStart.ReplaceAllString(s, `$1\_`) // within a word Markdown leaves it alone
	return docPath.ReplaceAllString(s, "[$1]($1)")
}

func textCell(s string) string {
	s = strings.ReplaceAll(proseDoc(s), "|", `\|`)
	return lineBreak.ReplaceAllString(s, "<br>")
}

// codeCell returns code in a cell; a vertical bar in backquotes would end it in some readers.
func codeCell(s string) string {
	if !strings.Contains(s, "|") {
		return "`" + s + "`"
	}
	return "<code>" + strings.ReplaceAll(html.EscapeString(s), "|", "&#124;") + "</code>"
}

// dedent removes the indent of the first level of the help.
func dedent(s string) string {
	return strings.TrimPrefix(strings.ReplaceAll(s, "\n  ", "\n"), "  ")
}
