package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"sluice/router/e2e/harness"
	"sluice/router/pd/family"
)

func readDoc(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../..", path))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// TestEnginesDoc: every family has a section in docs/engines.md. sluice check accepts each
// configuration in it without a warning, and the configuration selects that family.
func TestEnginesDoc(t *testing.T) {
	block := regexp.MustCompile("(?s)\n```(yaml)?\n(.*?)\n```\n")
	sections := map[string]string{}
	for _, s := range strings.Split(readDoc(t, "docs/engines.md"), "\n## ")[1:] {
		title, rest, _ := strings.Cut(s, "\n")
		name := ""
		if strings.HasPrefix(title, "`") {
			name = strings.Split(title, "`")[1]
		}
		sections[name] = "\n" + rest
	}
	for _, family := range append(family.Names(), "") {
		section, ok := sections[family]
		if !ok {
			t.Errorf("no section of family %s", family)
		}
		files, lines := 0, 0
		check := func(what string, args ...string) {
			var out, errs harness.SyncBuffer
			code := runArgs("check", args, &out, &errs)
			if printed := out.String(); code != 0 || strings.Contains(printed, "warnings:") || family != "" && !strings.Contains(printed, "("+family+")") {
				t.Errorf("%s: exit %d\n%s\n%s%s", family, code, what, printed, errs.String())
			}
		}
		for i, m := range block.FindAllStringSubmatch(section, -1) {
			if m[1] == "yaml" {
				files++
				path := filepath.Join(t.TempDir(), fmt.Sprintf("%d.yaml", i))
				if err := os.WriteFile(path, []byte(m[2]), 0o600); err != nil {
					t.Fatal(err)
				}
				check(m[2], "--config", path)
				continue
			}
			for line := range strings.SplitSeq(m[2], "\n") {
				if args, ok := strings.CutPrefix(line, "bin/sluice serve "); ok {
					lines++
					check(line, strings.Fields(args)...)
				}
			}
		}
		if files == 0 || lines == 0 && family != "" {
			t.Errorf("%q: %d configurations and %d command lines", family, files, lines)
		}
	}
}

// TestReadmeNamesHeaders: README.md names every header of the router's own.
func TestReadmeNamesHeaders(t *testing.T) {
	readme := readDoc(t, "README.md")
	header := regexp.MustCompile(`"(X-Sluice-[A-Za-z-]*[a-z])"`)
	named := map[string]bool{}
	for _, root := range []string{"../../dataplane", "../../router", "."} {
		err := filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range header.FindAllStringSubmatch(string(text), -1) {
				named[m[1]] = true
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if len(named) < 10 {
		t.Fatalf("found %v only", named)
	}
	for name := range named {
		if !strings.Contains(readme, "`"+name+"`") {
			t.Errorf("README.md does not name %s", name)
		}
	}
}
