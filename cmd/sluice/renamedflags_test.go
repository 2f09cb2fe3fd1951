package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"
)

// TestRenamedFlags: each old flag is replaced by the present one with one warning, and its command
// accepts the present one. Both on one command line are an error that names both.
func TestRenamedFlags(t *testing.T) {
	for _, r := range renamedFlags {
		for _, args := range [][]string{{"--" + r.old, "v"}, {"-" + r.old, "v"}, {"--" + r.old + "=v"}, {"--" + r.old, "v", "--" + r.old, "w"}} {
			var warnings bytes.Buffer
			got, err := presentFlags(r.command, args, &warnings)
			if err != nil || strings.Contains(strings.Join(got, " "), "-"+r.old+" ") || !strings.HasPrefix(got[0], "--"+r.present) || len(got) != len(args) {
				t.Errorf("%s %q: %q, %v", r.command, args, got, err)
			}
			if n := strings.Count(warnings.String(), "is now named --"+r.present); n != 1 {
				t.Errorf("%s %q: %d warnings; want 1", r.command, args, n)
			}
		}
		var warnings bytes.Buffer
		if _, err := presentFlags(r.command, []string{"--" + r.old, "v", "--" + r.present, "v"}, &warnings); err == nil || !strings.Contains(err.Error(), r.old) || !strings.Contains(err.Error(), r.present) {
			t.Errorf("%s with both names: %v", r.command, err)
		}
		warnings.Reset()
		same := []string{"--" + r.present, "v", "--", "--" + r.old}
		if got, err := presentFlags(r.command, same, &warnings); err != nil || !slices.Equal(got, same) || warnings.Len() > 0 {
			t.Errorf("%s %q: %q, %v, %s", r.command, same, got, err, warnings.String())
		}
		var help bytes.Buffer
		if code := run(t.Context(), []string{r.command, "--help"}, &help, &help); code != 0 || !strings.Contains(help.String(), "-"+r.present+" ") || strings.Contains(help.String(), "-"+r.old+" ") {
			t.Errorf("%s --help has no --%s, or an old name: %s", r.command, r.present, help.String())
		}
	}
}
