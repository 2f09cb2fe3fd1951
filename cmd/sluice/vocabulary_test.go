package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

// privateWords are words that this project once used for things that have a standard
// term, which stands beside each. No declared name may contain them.
var privateWords = map[string]string{
	"abandonment": "abort", "beside": "concurrent", "census": "summary",
	"courtesy": "yield", "foretold": "predicted", "giveback": "release", "glance": "peek, tryRead", "guest": "pendingConn",
	"hanger": "canceller", "heir": "child", "lobby": "pendingQueue", "mover": "migration", "outlet": "item writer",
	"parting": "drain responder", "party": "in-process exchange", "patience": "stall detector", "patrol": "sweeper",
	"picky": "filter", "said": "actual", "seam": "splice point", "shutter": "closer",
	"tattle": "report", "told": "reported", "untold": "unknown", "veil": "redact", "vigil": "monitor", "whatif": "replay",
	"whose": "owner",
}

// privatePhrases must not stand in documents; the term to use stands beside each.
var privatePhrases = map[string]string{
	`foretold`: "predicted", `\banew\b`: "again", `\bat the most\b`: "at most", `\bin vain\b`: "without effect",
	`\bparted by\b`: "separated by", `\bnot to be had\b`: "unavailable", `\bof ours\b`: "of Sluice",
}

// TestVocabulary keeps private words out of declared names and out of documents;
// docs/glossary.md has the terms.
func TestVocabulary(t *testing.T) {
	forEachGoFile(t, func(path string, _ []string) {
		file, err := parser.ParseFile(token.NewFileSet(), filepath.Join(repositoryRoot, path), nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range declaredNames(file) {
			for _, word := range wordsOf(name) {
				if term, private := privateWords[word]; private {
					t.Errorf("%s: %q contains the private word %q; use %s", path, name, word, term)
				}
			}
		}
	})
	pages, _ := filepath.Glob(filepath.Join(repositoryRoot, "docs", "*.md"))
	for _, name := range []string{"README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"} {
		pages = append(pages, filepath.Join(repositoryRoot, name))
	}
	for _, page := range pages {
		if strings.HasPrefix(filepath.Base(page), "e2e-") {
			continue // the output of a run
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for phrase, term := range privatePhrases {
			if at := regexp.MustCompile(phrase).FindIndex(text); at != nil {
				t.Errorf("%s:%d: write %q in place of %q", page, 1+bytes.Count(text[:at[0]], []byte("\n")), term, text[at[0]:at[1]])
			}
		}
	}
}

// declaredNames lists the names of functions, types, fields, constants and variables that a
// file declares at its top level.
func declaredNames(file *ast.File) (names []string) {
	for _, d := range file.Decls {
		switch d := d.(type) {
		case *ast.FuncDecl:
			names = append(names, d.Name.Name)
		case *ast.GenDecl:
			ast.Inspect(d, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.TypeSpec:
					names = append(names, n.Name.Name)
				case *ast.ValueSpec:
					for _, id := range n.Names {
						names = append(names, id.Name)
					}
					return false
				case *ast.Field:
					for _, id := range n.Names {
						names = append(names, id.Name)
					}
				}
				return true
			})
		}
	}
	return names
}

// wordsOf splits a name at its capitals and underscores, in lower case.
func wordsOf(name string) []string {
	var words strings.Builder
	previous := rune('_')
	for _, r := range name {
		if unicode.IsUpper(r) && !unicode.IsUpper(previous) || r == '_' {
			words.WriteByte(' ')
		}
		if r != '_' {
			words.WriteRune(unicode.ToLower(r))
		}
		previous = r
	}
	return strings.Fields(words.String())
}
