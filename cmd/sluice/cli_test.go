package main

import (
	"bytes"
	"context"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"sluice/router/e2e/harness"
)

// runArgs runs one subcommand without standard input.
func runArgs(name string, args []string, stdout, stderr io.Writer) int {
	return run(context.Background(), append([]string{name}, args...), stdout, stderr)
}

// leafCommands returns all commands that can be run, with their arguments.
func leafCommands(cmd *cobra.Command) (list []*cobra.Command) {
	for _, c := range cmd.Commands() {
		switch {
		case c.Name() == "help":
		case c.HasSubCommands():
			list = append(list, leafCommands(c)...)
		default:
			list = append(list, c)
		}
	}
	return list
}

// TestHelp: --help of every command goes to standard output, has examples and exit codes, and says
// nothing of its own in brackets.
func TestHelp(t *testing.T) {
	root := newRoot()
	for _, cmd := range leafCommands(root) {
		path := strings.Fields(cmd.CommandPath())[1:]
		for _, args := range [][]string{append(path, "--help"), append(path, "-h"), append([]string{"help"}, path...)} {
			var out, errs bytes.Buffer
			if code := run(t.Context(), args, &out, &errs); code != 0 || errs.Len() > 0 {
				t.Errorf("%q: exit %d: %s", args, code, &errs)
			}
			for _, want := range []string{"Usage: sluice " + strings.Join(path, " "), "\nExamples:\n  ", "\nFlags:\n", "Exit codes: 0 ", "--help"} {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q: no %q in\n%s", args, want, &out)
				}
			}
			for _, bad := range []string{"found out", "(default 0s)", "anew", "likewise"} {
				if strings.Contains(out.String(), bad) {
					t.Errorf("%q: %q in\n%s", args, bad, &out)
				}
			}
		}
		for line := range strings.Lines(cmd.Long) {
			if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > helpColumns {
				t.Errorf("%s: a line of the help has %d characters: %s", cmd.CommandPath(), n, line)
			}
		}
		if cmd.GroupID == "" && cmd.Parent() == root {
			t.Errorf("%s is in no group", cmd.Name())
		}
	}
}

func TestRootHelp(t *testing.T) {
	for _, args := range [][]string{{"--help"}, {"-h"}, {"-help"}, {"help"}} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), args, &out, &errs); code != 0 || errs.Len() > 0 {
			t.Errorf("%q: exit %d: %s", args, code, &errs)
		}
		for _, cmd := range newRoot().Commands() {
			if !cmd.Hidden && !strings.Contains(out.String(), "  "+cmd.Name()+" ") {
				t.Errorf("%q does not list %s:\n%s", args, cmd.Name(), &out)
			}
		}
	}
}

func TestUsageErrors(t *testing.T) {
	for _, c := range []struct {
		args []string
		says string
	}{
		{nil, "Usage:"},
		{[]string{"serv"}, `unknown command "serv" (did you mean "serve"?)`},
		{[]string{"nothing-like-it"}, "unknown command"},
		{[]string{"check", "--confg", "x"}, `unknown flag --confg (did you mean "--config"?)`},
		{[]string{"check", "-confg", "x"}, `unknown flag --confg (did you mean "--config"?)`},
		{[]string{"check", "-x"}, "unknown flag -x"},
		{[]string{"check", "--timeout"}, "--timeout"},
		{[]string{"check", "--timeout", "soon"}, `"soon"`},
		{[]string{"check", "file.yaml"}, `unexpected argument "file.yaml"`},
		{[]string{"explain"}, "want one request id, got 0"},
		{[]string{"help", "serv"}, `unknown command "serv"`},
	} {
		var out, errs bytes.Buffer
		if code := run(t.Context(), c.args, &out, &errs); code != 2 || !strings.Contains(errs.String(), c.says) || out.Len() > 0 {
			t.Errorf("%q: exit %d: %s%s; want 2 and %q", c.args, code, &out, &errs, c.says)
		}
		if c.args != nil && strings.Count(errs.String(), "\n") > 2 {
			t.Errorf("%q: more than a line:\n%s", c.args, &errs)
		}
	}
}

// TestCompletionScripts: the script of each shell is printed, and bash completes commands and values
// of flags with it.
func TestCompletionScripts(t *testing.T) {
	for _, shell := range completionShells {
		var out, errs bytes.Buffer
		if code := runArgs("completion", []string{shell}, &out, &errs); code != 0 || !strings.Contains(out.String(), "sluice") || errs.Len() > 0 {
			t.Errorf("%s: exit %d: %s", shell, code, &errs)
		}
	}
	for _, args := range [][]string{nil, {"tcsh"}, {"bash", "zsh"}} {
		var out, errs bytes.Buffer
		if code := runArgs("completion", args, &out, &errs); code != 2 || !strings.Contains(errs.String(), "bash, zsh or fish") {
			t.Errorf("%q: exit %d: %s", args, code, &errs)
		}
	}
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip("no bash")
	}
	// A stub of the one function of bash-completion that the script needs.
	script := `compopt() { :; }
_get_comp_words_by_ref() { words=("${COMP_WORDS[@]}"); cword=$COMP_CWORD; cur=${words[cword]}; prev=${words[cword-1]}; }
source <("$0" completion bash) || exit
COMP_WORDS=(sluice dem) COMP_CWORD=1 COMP_TYPE=9; __start_sluice; echo "${COMPREPLY[@]}"
COMP_WORDS=(sluice serve --policy round) COMP_CWORD=3; __start_sluice; echo "${COMPREPLY[@]}"
COMP_WORDS=(sluice check --prob) COMP_CWORD=2; __start_sluice; echo "${COMPREPLY[@]}"`
	binary := harness.BuiltBinary(t)
	link := filepath.Join(t.TempDir(), "sluice")
	if err := os.Symlink(binary, link); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), bash, "--norc", "-c", script, link)
	cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(link)+":"+os.Getenv("PATH"))
	out, err := cmd.CombinedOutput()
	if want := "demo\nround_robin\n--probe\n"; err != nil || strings.ReplaceAll(string(out), " \n", "\n") != want {
		t.Errorf("%v: %q; want %q", err, out, want)
	}
}
