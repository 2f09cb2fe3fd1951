package config

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestDocs compares docs/config.md with the code; -rewrite writes it.
func TestDocs(t *testing.T) {
	const path = "../../docs/config.md"
	var b strings.Builder
	b.WriteString("# Configuration\n\n" +
		"This page lists every field of the configuration.\n`sluice serve` needs no file:\n\n" +
		"```\nsluice serve --engine http://10.0.0.1:8000\nsluice serve --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000,ranks=4\nsluice init http://10.0.0.1:8000 -o sluice.yaml            # writes a file from running engines\nsluice check --config sluice.yaml                          # prints errors, or what the configuration would do\n```\n\n" +
		"- `--config FILE` (or `$SLUICE_CONFIG`) names a YAML file. Environment variables take precedence over the file, flags over both.\n" +
		"- An environment variable is named after the field's path: `timeouts.prefill` is `SLUICE_TIMEOUTS_PREFILL`. `--set timeouts.prefill=60s` sets the same field.\n" +
		"- Unknown fields, wrong types and impossible values are errors with line and column, reported all at once. `sluice check` also reads the certificates that the configuration names.\n" +
		"- A variable `SLUICE_…` that begins with the name of a section, such as `SLUICE_TIMEOUTS_`, and names no field of it is an error. Any other that sets nothing but resembles one that does causes a warning, also at the start.\n" +
		"- Renamed fields accept their old name for one release: [upgrading.md](upgrading.md).\n\n" +
		"The code writes this page (`go test ./router/config -run TestDocs -rewrite`).\n\n" +
		"## Workers\n\n```yaml\nworkers:\n  - url: http://10.0.0.1:8000\n    role: prefill          # prefill, decode or aggregated\n  - url: http://10.0.0.2:8000\n    role: decode\n    ranks: [0, 1, 2, 3]    # data-parallel ranks behind one URL\n```\n\n" +
		"The same on the command line: `--prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000,ranks=4`.\nThese keys may follow a URL:\n\n```\n")
	b.WriteString(KeyTable())
	b.WriteString("```\n\n## All other fields\n\nDefaults are in brackets.\n\n`sluice reload` applies the fields marked ●, and the entries of workers.\n`[]` stands for each entry of a list, `NAME` for a name of your choice.\nThe others need `sluice restart`, for the reason given.\n\n| field | what it is | reload |\n| --- | --- | --- |\n")
	fieldTable(t, &b)
	b.WriteString("\n## Sample file\n\nEvery field that has a default, commented out:\n\n```yaml\n")
	b.WriteString(Sample(nil))
	b.WriteString("```\n\n`models` overrides `pd` by model name:\n\n```yaml\nmodels:\n  my-model:\n    pd:\n      family: off          # one worker does the whole request\n```\n")
	if *rewrite {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != b.String() {
		t.Errorf("%s is not what the code says; run: go test ./router/config -run TestDocs -rewrite", path)
	}
}

// TestDocsHaveEveryField: docs/config.md has a row for each field, those of lists' entries included.
func TestDocsHaveEveryField(t *testing.T) {
	text, err := os.ReadFile("../../docs/config.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := 0
	var walk func(v reflect.Type, prefix string)
	walk = func(v reflect.Type, prefix string) {
		for _, f := range fieldsOf(v) {
			path, of := prefix+f.Tag.Get("yaml"), f.Type
			if path == "workers" { // their keys have a table of their own
				continue
			}
			if of.Kind() == reflect.Struct {
				walk(of, path+".")
				continue
			}
			if rows++; !strings.Contains(string(text), "\n| `"+path+"` | ") {
				t.Errorf("docs/config.md has no row for %s", path)
			}
			switch {
			case of.Kind() == reflect.Slice && of.Elem().Kind() == reflect.Struct:
				walk(of.Elem(), path+"[].")
			case of.Kind() == reflect.Map && of.Elem().Kind() == reflect.Struct:
				walk(of.Elem(), path+".NAME.")
			}
		}
	}
	walk(reflect.TypeFor[Config](), "")
	if rows < 200 {
		t.Errorf("%d fields; want all", rows)
	}
}

// goNames matches names of fields of Config that a reader of the file does not know.
var goNames = regexp.MustCompile(`\b(APIKeys|EngineKey|RuntimeFile|ProxyHost|ProxyPort|CompletionTimeout|AbortDelay|EarlyHeadersAfter|CommentInterval|DecodeAttempts|DecodeOnlyFallback|MemoryBudget|PrefillOnly|[A-Z][a-z]+(?:[A-Z][a-z]+)+)\b`)

// withoutName returns a doc comment without the Go name with which it starts, and without the verb
// "is" or "are" behind it: the row of a field starts with its key.
func withoutName(comment, name string) string {
	rest, ok := strings.CutPrefix(comment, name+" ")
	if !ok {
		return comment
	}
	for _, verb := range []string{"is ", "are "} {
		rest = strings.TrimPrefix(rest, verb)
	}
	return rest
}

// fieldTable writes a row for every field that the structs of config.go have,
// with its comment there.
func fieldTable(t *testing.T, b *strings.Builder) {
	t.Helper()
	file, err := parser.ParseFile(token.NewFileSet(), "config.go", nil, parser.ParseComments)
	if err != nil {
		t.Fatal(err)
	}
	structs := map[string]*ast.StructType{}
	ast.Inspect(file, func(n ast.Node) bool {
		if ts, ok := n.(*ast.TypeSpec); ok {
			if st, ok := ts.Type.(*ast.StructType); ok {
				structs[ts.Name.Name] = st
			}
		}
		return true
	})
	// entriesOf returns the struct of a list's or a map's entries, and how a path names one of them.
	entriesOf := func(e ast.Expr) (st *ast.StructType, in string) {
		switch e := e.(type) {
		case *ast.ArrayType:
			id, _ := e.Elt.(*ast.Ident)
			if id != nil {
				return structs[id.Name], "[]."
			}
		case *ast.MapType:
			id, _ := e.Value.(*ast.Ident)
			if id != nil {
				return structs[id.Name], ".NAME."
			}
		}
		return nil, ""
	}
	var walk func(prefix string, st *ast.StructType)
	walk = func(prefix string, st *ast.StructType) {
		for _, f := range st.Fields.List {
			if f.Tag == nil {
				continue
			}
			tag, err := strconv.Unquote(f.Tag.Value)
			if err != nil {
				t.Fatal(err)
			}
			name, _, _ := strings.Cut(reflect.StructTag(tag).Get("yaml"), ",")
			if id, ok := f.Type.(*ast.Ident); ok && structs[id.Name] != nil {
				walk(prefix+name+".", structs[id.Name])
				continue
			}
			what := strings.TrimSpace(f.Comment.Text())
			if f.Doc != nil {
				what = withoutName(strings.TrimSpace(f.Doc.Text()), f.Names[0].Name)
			}
			for _, word := range goNames.FindAllString(what, -1) {
				t.Errorf("config.go: the comment of field %s%s contains the Go name %s; name the key", prefix, name, word)
			}
			if name == "" || name == "-" || prefix == "" && name == "workers" { // its keys have a table of their own
				continue
			}
			if what == "" {
				t.Errorf("config.go: field %s%s has no comment", prefix, name)
			}
			path, _, _ := strings.Cut(prefix+name, "[") // an entry's fields are like the list
			group, _, _ := strings.Cut(path, ".")
			mark := restartReason(path)
			if Reloadable(path) || group == "api_keys" || group == "models" {
				mark = "●"
			}
			if path == "models" && path == prefix+name {
				mark = "●; not their names, nor a family"
			}
			b.WriteString("| `" + prefix + name + "` | " + strings.ReplaceAll(strings.ReplaceAll(what, "\n", " "), "|", "\\|") + " | " + mark + " |\n")
			if entry, in := entriesOf(f.Type); entry != nil {
				walk(prefix+name+in, entry)
			}
		}
	}
	walk("", structs["Config"])
}
