package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

// rewriteDocs reports whether the test is to write what it checks: the flag -rewrite, which package
// harness defines.
func rewriteDocs() bool { return flag.Lookup("rewrite").Value.String() == "true" }

// TestCommandsDoc compares the list of docs/commands.md with the commands; -rewrite writes it. README.md
// names every command.
func TestCommandsDoc(t *testing.T) {
	const path, head = "../../docs/commands.md", "## List\n\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), head)
	_, after, found2 := strings.Cut(rest, "## ")
	if !found || !found2 {
		t.Fatalf("%s has no list", path)
	}
	root, readme := newRoot(), readDoc(t, "README.md")
	var list strings.Builder
	for _, g := range root.Groups() {
		fmt.Fprintf(&list, "%s\n\n| command | what it does |\n| --- | --- |\n", g.Title)
		for _, cmd := range leafCommands(root) {
			top := cmd
			for top.Parent() != root {
				top = top.Parent()
			}
			if cmd.Hidden || top.GroupID != g.ID {
				continue
			}
			fmt.Fprintf(&list, "| `%s` | %s |\n", cmd.CommandPath(), cmd.Short)
			if !strings.Contains(readme, "`"+cmd.Name()) && !strings.Contains(readme, "`"+cmd.CommandPath()) {
				t.Errorf("README.md does not name %s", cmd.CommandPath())
			}
		}
		list.WriteString("\n")
	}
	want := before + head + list.String() + "## " + after
	if rewriteDocs() {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if want != string(text) {
		t.Errorf("%s is out of date; run: go test ./cmd/sluice -run TestCommandsDoc -rewrite", path)
	}
}
