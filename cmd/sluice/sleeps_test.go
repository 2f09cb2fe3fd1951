package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// maxSleeps bounds the free-standing sleeps of the whole module's tests.
const maxSleeps = 39

// maxPaces bounds the uses of testwait.Pace, so that it does not become another name for a sleep.
const maxPaces = 96

// TestFreeStandingSleeps: a test that sleeps for a fixed time is slow where the time is too long and
// fails on a loaded machine where it is too short. A wait for a condition is testwait.Until, a test
// whose subject is time runs in a synctest bubble, and the pace of a client or an engine that is slow
// on purpose is testwait.Pace. Sleeps in a bubble are not counted, because they take no time: those in
// a function literal given to synctest.Test, and lines that end in the comment "in a bubble".
func TestFreeStandingSleeps(t *testing.T) {
	var sleeps, paces []string
	forEachGoFile(t, func(path string, _ []string) {
		dir := filepath.ToSlash(filepath.Dir(path))
		if dir == waitPackage || dir != harnessPackage && !strings.HasSuffix(path, "_test.go") {
			return
		}
		s, p := findSleeps(t, path)
		sleeps, paces = append(sleeps, s...), append(paces, p...)
	})
	slices.Sort(sleeps)
	t.Logf("%d free-standing sleeps, %d paces", len(sleeps), len(paces))
	if len(sleeps) > maxSleeps {
		t.Errorf("%d free-standing time.Sleep in tests, want at most %d; see bench/testwait:\n%s", len(sleeps), maxSleeps, strings.Join(sleeps, "\n"))
	}
	if len(paces) > maxPaces {
		t.Errorf("%d uses of testwait.Pace, want at most %d: is the pace the subject of each?\n%s", len(paces), maxPaces, strings.Join(paces, "\n"))
	}
}

// findSleeps returns the positions of a file's calls of time.Sleep and testwait.Pace outside synctest
// bubbles.
func findSleeps(t *testing.T, path string) (sleeps, paces []string) {
	t.Helper()
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, filepath.Join(repositoryRoot, path), nil, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	inBubble := map[int]bool{} // by line
	for _, group := range file.Comments {
		for _, c := range group.List {
			if c.Text == "// in a bubble" {
				inBubble[fset.Position(c.Pos()).Line] = true
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if call, ok := n.(*ast.CallExpr); ok && isSelector(call.Fun, "synctest", "Test") {
			return false
		}
		if s, ok := n.(*ast.SelectorExpr); ok && !inBubble[fset.Position(s.Pos()).Line] {
			at := fmt.Sprintf("%s:%d", path, fset.Position(s.Pos()).Line)
			switch {
			case isSelector(s, "time", "Sleep"):
				sleeps = append(sleeps, at)
			case isSelector(s, "testwait", "Pace"):
				paces = append(paces, at)
			}
		}
		return true
	})
	return sleeps, paces
}

func isSelector(e ast.Expr, pkg, name string) bool {
	s, ok := e.(*ast.SelectorExpr)
	if !ok || s.Sel.Name != name {
		return false
	}
	id, ok := s.X.(*ast.Ident)
	return ok && id.Name == pkg
}
