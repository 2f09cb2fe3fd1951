package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// TestRenamedFlags: each old flag is replaced by the present one with one warning, and its command
// accepts the present one. Both on one command line are an error that names both.
func TestRenamedFlags(t *testing.T) {
	for _, r := range renamedFlags {
		cmd := child(newRoot(), r.command)
		normalize := func(args []string) ([]string, string, error) {
			var warnings []string
			got, err := normalizeArgs(cmd, args, func(w string) { warnings = append(warnings, w) })
			return got, strings.Join(warnings, "\n"), err
		}
		for _, args := range [][]string{{"--" + r.old, "v"}, {"-" + r.old, "v"}, {"--" + r.old + "=v"}, {"--" + r.old, "v", "--" + r.old, "w"}} {
			got, warnings, err := normalize(args)
			if err != nil || strings.Contains(strings.Join(got, " "), "-"+r.old+" ") || !strings.HasPrefix(got[0], "--"+r.present) || len(got) != len(args) {
				t.Errorf("%s %q: %q, %v", r.command, args, got, err)
			}
			if n := strings.Count(warnings, "is now named --"+r.present); n != 1 {
				t.Errorf("%s %q: %d warnings; want 1", r.command, args, n)
			}
		}
		for _, args := range [][]string{{"--" + r.old, "v", "--" + r.present, "v"}, {"--" + r.present, "v", "--" + r.old, "v"}} {
			if _, _, err := normalize(args); err == nil || !strings.Contains(err.Error(), "--"+r.old+" and --"+r.present) {
				t.Errorf("%s with both names: %v", r.command, err)
			}
		}
		same := []string{"--" + r.present, "v", "--", "--" + r.old}
		if got, warnings, err := normalize(same); err != nil || !slices.Equal(got, same) || warnings != "" {
			t.Errorf("%s %q: %q, %v, %s", r.command, same, got, err, warnings)
		}
		var help bytes.Buffer
		if code := runArgs(r.command, []string{"--help"}, &help, &help); code != 0 || !strings.Contains(help.String(), "-"+r.present+" ") || strings.Contains(help.String(), "--"+r.old+" ") {
			t.Errorf("%s --help has no --%s, or an old name: %s", r.command, r.present, help.String())
		}
	}
}

// TestSingleDash: a long flag with one dash is accepted with one warning, and values of flags are
// never taken for flags.
func TestSingleDash(t *testing.T) {
	for _, c := range []struct {
		command    string
		args, want []string
		warnings   int
	}{
		{"check", []string{"-config", "x"}, []string{"--config", "x"}, 1},
		{"check", []string{"-config=x", "-probe", "-set", "a=b"}, []string{"--config=x", "--probe", "--set", "a=b"}, 1},
		{"check", []string{"--config", "-probe"}, []string{"--config", "-probe"}, 0},
		{"check", []string{"--config", "--", "--probe"}, []string{"--config", "--", "--probe"}, 0},
		{"check", []string{"-h"}, []string{"-h"}, 0},
		{"check", []string{"-help"}, []string{"--help"}, 1},
		{"check", []string{"-probe=false"}, []string{"--probe=false"}, 1},
		{"check", []string{"-nonsense"}, []string{"--nonsense"}, 1},
		{"init", []string{"-o", "-force", "-force"}, []string{"-o", "-force", "--force"}, 1},
		{"init", []string{"-ofile", "--o", "file"}, []string{"-ofile", "--output", "file"}, 0},
		{"sim", []string{"--records", "-1", "-ranks", "2"}, []string{"--records", "-1", "--ranks", "2"}, 1},
		{"key", []string{"-", "-=x"}, []string{"-", "-=x"}, 0},
	} {
		warnings := 0
		got, err := normalizeArgs(child(newRoot(), c.command), c.args, func(string) { warnings++ })
		if err != nil || !slices.Equal(got, c.want) || warnings != c.warnings {
			t.Errorf("%s %q: %q with %d warnings, %v; want %q with %d", c.command, c.args, got, warnings, err, c.want, c.warnings)
		}
	}
	var out, errs bytes.Buffer
	if code := runArgs("check", []string{"-engine", "http://127.0.0.1:1"}, &out, &errs); code != 0 || strings.Count(errs.String(), "write --engine instead of -engine") != 1 {
		t.Errorf("check -engine: exit %d: %s", code, &errs)
	}
}

// TestSingleDashOfEveryFlag: every long flag of every command is accepted with one dash.
func TestSingleDashOfEveryFlag(t *testing.T) {
	for _, cmd := range newRoot().Commands() {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			got, err := normalizeArgs(cmd, []string{"-" + f.Name, "v"}, func(string) {})
			if err != nil || got[0] != "--"+f.Name || len(got) != 2 {
				t.Errorf("%s -%s: %q, %v", cmd.Name(), f.Name, got, err)
			}
		})
	}
}
