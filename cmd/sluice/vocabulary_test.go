package main

import (
	"bytes"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"
)

// privateWords are words that this project once used for things that have a standard
// term, which follows each. No name may contain them: of a file, of a declaration in Go at
// any depth, and none of the console.
var privateWords = map[string]string{
	"abandonment": "abort", "anew": "again", "bell": "yield", "beside": "concurrent", "census": "summary",
	"courtesy": "yield", "crowded": "at capacity", "cutter": "canceller", "foretold": "predicted", "giveback": "release", "glance": "peek, tryRead", "guest": "pendingConn",
	"hanger": "canceller", "haste": "poll mode", "heir": "child", "inquiry": "probe", "lean": "memory tuner", "ledger": "load counters", "lend": "lease, detach",
	"lobby": "pendingQueue", "looped": "loop stream", "loose": "unconstrained", "movable": "migratable", "mover": "migration", "outlet": "item writer", "parcel": "pending write",
	"parting": "drain responder", "party": "in-process exchange", "patience": "timeout", "patrol": "sweeper",
	"picky": "filter", "pulse": "keep-alive", "said": "reported, actual", "scarce": "reserved",
	"seam": "splice point", "seat": "rank breaker", "shutter": "closer", "speaker": "formatter",
	"tattle": "report", "told": "reported, notified", "twin": "compared", "untold": "unknown", "veil": "redact", "vigil": "monitor", "whatif": "replay",
	"whose": "owner",
}

// privatePhrases are text that is not technical English of the field, in lower case, with the term
// to use. No document, comment, message, script or page of the console may contain them as whole
// words, also where a line ends between two words.
var privatePhrases = map[string]string{
	"foretold": "predicted", "untold": "unknown", "told": "notified, reported or distinguished",
	"twin": "compared", "anew": "again", "for ever": "without end", "at the most": "at most", "in vain": "without effect",
	"parted by": "separated by", "not to be had": "unavailable", "of ours": "of Sluice",
	"stand beside": "are combined with", "stands beside": "is combined with", "engine's words": "the engine's message", "engines' words": "the engines' messages",
	"under way": "in flight, in progress", "whoever": "the client or goroutine that", "somebody": "another process, goroutine or client",
	"census": "summary", "haste": "poll mode", "heir": "child", "ledger": "load counters", "lend": "lease or hand out", "lends": "leases or hands out", "lobby": "pending queue",
	"movable": "migratable", "mover": "migrator", "outlet": "item writer", "parcel": "pending write", "patrol": "sweeper", "pulse": "keep-alive",
	"seam": "splice point", "shutter": "closer", "tell of": "report", "tells of": "reports", "vigil": "monitor",
	"find out": "determine", "finds out": "determines", "found out": "read from, determined",
}

// idiomaticNo are words that may follow "is no" without an article, as in "is no longer".
var idiomaticNo = []string{"longer", "more", "less", "better", "later", "other", "one", "such"}

// phrasePatterns match the words of a phrase, which may be on several lines of a comment.
var phrasePatterns = func() map[string]*regexp.Regexp {
	patterns := map[string]*regexp.Regexp{}
	for words := range privatePhrases {
		patterns[words] = regexp.MustCompile(`\b` + strings.ReplaceAll(words, " ", `[\s/#*]+`) + `\b`)
	}
	return patterns
}()

// isNo finds "X is no Y": the subject's last word and the noun decide whether it is idiomatic.
var isNo = regexp.MustCompile(`(\w*)\W+(?:is|are|was|were)[\s/#*]+no[\s/#*]+(\w+)`)

// findPhrases calls report with the offset of each private phrase in text, and what to write instead.
func findPhrases(text []byte, report func(at int, phrase, term string)) {
	text = bytes.ToLower(text)
	for words, pattern := range phrasePatterns {
		last := words[strings.LastIndex(words, " ")+1:]
		if !bytes.Contains(text, []byte(last)) {
			continue
		}
		for _, at := range pattern.FindAllIndex(text, -1) {
			report(at[0], words, privatePhrases[words])
		}
	}
	for _, line := range noWord.FindAllIndex(text, -1) {
		from := max(0, line[0]-40)
		for _, at := range isNo.FindAllSubmatchIndex(text[from:min(len(text), line[1]+40)], -1) {
			subject, noun := string(text[from+at[2]:from+at[3]]), string(text[from+at[4]:from+at[5]])
			if from+at[4] > line[0] && from+at[0] < line[0] && subject != "there" && !slices.Contains(idiomaticNo, noun) {
				report(line[0], "is no "+noun, "is not a "+noun)
			}
		}
	}
}

// noWord finds the places where isNo may match.
var noWord = regexp.MustCompile(`\bno\b`)

// vocabularyExempt has the files that must contain old words, and generated ones.
var vocabularyExempt = []string{
	"cmd/sluice/vocabulary_test.go", "cmd/sluice/cli_test.go", // the lists of words
	"docs/upgrading.md", "router/obs/legacy.go", "router/admin/routes.go", // old names
	"bench/sim/textgen/wordlist.go", // text of simulated engines
}

// TestVocabulary keeps private words out of names, documents, comments, messages and the
// console; docs/glossary.md has the terms.
func TestVocabulary(t *testing.T) {
	forEachTextFile(t, func(path string, text []byte) {
		for _, word := range wordsOf(strings.TrimSuffix(filepath.Base(path), filepath.Ext(path))) {
			if term, private := privateWords[word]; private {
				t.Errorf("%s: the file name contains the private word %q; use %s", path, word, term)
			}
		}
		if slices.Contains(vocabularyExempt, path) {
			return
		}
		findPhrases(text, func(at int, phrase, term string) {
			t.Errorf("%s:%d: %q: write %q", path, 1+bytes.Count(text[:at], []byte("\n")), phrase, term)
		})
		for _, name := range namesIn(t, path, text) {
			for _, word := range wordsOf(name) {
				if term, private := privateWords[word]; private {
					t.Errorf("%s: %q contains the private word %q; use %s", path, name, word, term)
				}
			}
		}
	})
}

// TestVocabularyFinds checks that the patterns of TestVocabulary match what they refuse.
func TestVocabularyFinds(t *testing.T) {
	for text, want := range map[string]string{
		"the file is no YAML": "is no yaml", "there is no file": "", "it is no longer open": "", "// They are\n// no tokens": "is no tokens",
		"written Anew": "anew", "waits in\n\t// vain": "in vain", "a tolden word": "", "There is no\n// twin": "twin", "A is no B, there is no C": "is no b",
	} {
		var got []string
		findPhrases([]byte(text), func(_ int, phrase, _ string) { got = append(got, phrase) })
		if strings.Join(got, ", ") != want {
			t.Errorf("%q: found %q, want %q", text, got, want)
		}
	}
	const source = "package p\nfunc f(told int) { var whose, _ = 1, 2; for vigil := range told { heir := vigil; _ = heir } }\ntype t struct{ seam int }"
	names := namesIn(t, "p.go", []byte(source))
	for _, want := range []string{"told", "whose", "vigil", "heir", "seam"} {
		if !slices.Contains(names, want) {
			t.Errorf("names %v; want also %s", names, want)
		}
	}
	if names := namesIn(t, "c.js", []byte("let newestTwin = 1;")); !slices.Contains(names, "newestTwin") {
		t.Errorf("names of a script: %v", names)
	}
}

// forEachTextFile calls do for each source, script, page, document and configuration of the repository, with its
// path relative to the root. It leaves out test data and the output of runs.
func forEachTextFile(t *testing.T, do func(path string, text []byte)) {
	t.Helper()
	err := filepath.WalkDir(repositoryRoot, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		path, err = filepath.Rel(repositoryRoot, path)
		if err != nil {
			return err
		}
		name := d.Name()
		if d.IsDir() {
			if path != "." && (strings.HasPrefix(name, ".") || name == "testdata" || name == "node_modules" || name == "__pycache__" || name == "build" || name == "bin") {
				return filepath.SkipDir
			}
			return nil
		}
		switch filepath.Ext(name) {
		case ".go", ".md", ".py", ".sh", ".js", ".html", ".css", ".c", ".h", ".s", ".rs", ".toml", ".yaml", ".yml", ".svg", ".npmrc", ".service", ".socket":
		default:
			if name != "Makefile" {
				return nil
			}
		}
		if strings.HasPrefix(name, "e2e-") && filepath.Ext(name) == ".md" || path == "CHANGELOG.md" {
			return nil
		}
		text, err := os.ReadFile(filepath.Join(repositoryRoot, path))
		if err != nil {
			return err
		}
		do(filepath.ToSlash(path), text)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// scriptName matches the words of the console's scripts, pages and styles.
var scriptName = regexp.MustCompile(`[A-Za-z_][A-Za-z_0-9]*`)

// pythonName matches the declarations of Python: functions with their parameters, classes, variables and members.
var pythonName = regexp.MustCompile(`(?m)^\s*(?:def|class) (\w+\([^)]*\)|\w+)|^\s*(?:for )?((?:self\.)?\w+(?:, (?:self\.)?\w+)*) (?:=|in) `)

// namesIn lists the names that a file declares: in Go and Python at any depth, and in the console every word.
func namesIn(t *testing.T, path string, text []byte) (list []string) {
	t.Helper()
	switch filepath.Ext(path) {
	case ".go":
		file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		return declaredNames(file)
	case ".py":
		for _, match := range pythonName.FindAllSubmatch(text, -1) {
			for _, names := range match[1:] {
				list = append(list, scriptName.FindAllString(string(names), -1)...)
			}
		}
		return list
	case ".js", ".html", ".css":
		return scriptName.FindAllString(string(text), -1)
	}
	return nil
}

// declaredNames lists the names of functions, types, fields, parameters, constants and variables,
// local ones too.
func declaredNames(file *ast.File) (names []string) {
	add := func(list ...ast.Expr) {
		for _, x := range list {
			if id, ok := x.(*ast.Ident); ok {
				names = append(names, id.Name)
			}
		}
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			add(n.Name)
		case *ast.TypeSpec:
			add(n.Name)
		case *ast.ValueSpec:
			for _, id := range n.Names {
				add(id)
			}
		case *ast.Field:
			for _, id := range n.Names {
				add(id)
			}
		case *ast.AssignStmt:
			if n.Tok == token.DEFINE {
				add(n.Lhs...)
			}
		case *ast.RangeStmt:
			if n.Tok == token.DEFINE {
				add(n.Key, n.Value)
			}
		}
		return true
	})
	return names
}

// wordsOf splits a name at its capitals, underscores and hyphens, in lower case.
func wordsOf(name string) []string {
	var words strings.Builder
	previous := rune('_')
	for _, r := range name {
		separator := r == '_' || r == '-' || r == '.'
		if unicode.IsUpper(r) && !unicode.IsUpper(previous) || separator {
			words.WriteByte(' ')
		}
		if !separator {
			words.WriteRune(unicode.ToLower(r))
		}
		previous = r
	}
	return strings.Fields(words.String())
}
