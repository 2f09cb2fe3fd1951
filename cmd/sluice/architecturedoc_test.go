package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// architectureSection returns the text of ARCHITECTURE.md from a heading to the next one of any level.
func architectureSection(t *testing.T, heading string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(repositoryRoot, "ARCHITECTURE.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n"+heading+"\n")
	if !ok {
		t.Fatalf("ARCHITECTURE.md has no section %q", heading)
	}
	section, _, _ = strings.Cut(section, "\n#")
	return section
}

// parseFile parses a Go file of the repository without its comments.
func parseFile(t *testing.T, path string) *ast.File {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(repositoryRoot, path), nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	return file
}

// TestClientGoneTable: the table of ARCHITECTURE.md lists every function of the router that registers
// a callback for the client's disconnect, and none that does not.
func TestClientGoneTable(t *testing.T) {
	listed := map[string]bool{}
	for _, at := range regexp.MustCompile("`(\\w+/[\\w/]+\\.go: \\w+)`").FindAllStringSubmatch(architectureSection(t, "### A client that disconnects"), -1) {
		listed[at[1]] = false
	}
	forEachGoFile(t, func(path string, _ []string) {
		short, inRouter := strings.CutPrefix(filepath.ToSlash(path), "router/")
		if !inRouter || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(short, "e2e/") {
			return
		}
		for _, d := range parseFile(t, path).Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || !registersClientGone(f) {
				continue
			}
			at := short + ": " + f.Name.Name
			if _, ok := listed[at]; !ok {
				t.Errorf("%s calls OnClientGone: add `%s` to the table of clients that disconnect", path, at)
			}
			listed[at] = true
		}
	})
	for at, found := range listed {
		if !found {
			t.Errorf("the table names `%s`, which does not call OnClientGone", at)
		}
	}
}

// registersClientGone reports whether a function calls OnClientGone with a callback.
func registersClientGone(f *ast.FuncDecl) (registers bool) {
	ast.Inspect(f, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) != 1 {
			return true
		}
		if s, ok := call.Fun.(*ast.SelectorExpr); ok && s.Sel.Name == "OnClientGone" {
			id, ok := call.Args[0].(*ast.Ident)
			registers = registers || !ok || id.Name != "nil"
		}
		return true
	})
	return registers
}

// TestLockTable: the locks that ARCHITECTURE.md names exist, so a renamed or removed lock changes the
// lock order.
func TestLockTable(t *testing.T) {
	locks := map[string]bool{} // pkg.Type.field, Type.field and pkg.variable
	forEachGoFile(t, func(path string, _ []string) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		file := parseFile(t, path)
		for _, d := range file.Decls {
			g, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, spec := range g.Specs {
				switch spec := spec.(type) {
				case *ast.ValueSpec:
					if isMutex(spec.Type) {
						for _, id := range spec.Names {
							locks[file.Name.Name+"."+id.Name] = true
						}
					}
				case *ast.TypeSpec:
					st, ok := spec.Type.(*ast.StructType)
					if !ok {
						continue
					}
					for _, field := range st.Fields.List {
						for _, id := range field.Names {
							if isMutex(field.Type) {
								locks[spec.Name.Name+"."+id.Name] = true
								locks[file.Name.Name+"."+spec.Name.Name+"."+id.Name] = true
							}
						}
					}
				}
			}
		}
	})
	rows := 0
	for line := range strings.Lines(architectureSection(t, "## Lock order")) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 && !strings.HasPrefix(line, "Leaf locks") && !strings.HasPrefix(line, "A leaf lock") {
			continue
		}
		if len(cells) >= 4 { // the third column is prose
			rows++
			line = cells[1] + cells[2]
		}
		for _, name := range regexp.MustCompile("`([\\w.]+\\.(?:\\w*[mM]u|write|reloads|loading))`").FindAllStringSubmatch(line, -1) {
			if !locks[name[1]] {
				t.Errorf("the lock order names `%s`, which is not a mutex", name[1])
			}
		}
	}
	if rows < 20 {
		t.Errorf("the lock order has %d rows; want 20 or more", rows)
	}
}

func isMutex(e ast.Expr) bool {
	return isSelector(e, "sync", "Mutex") || isSelector(e, "sync", "RWMutex")
}
