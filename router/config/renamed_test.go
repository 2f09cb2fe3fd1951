package config

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// yamlOf is a file that sets the field of a path to a value.
func yamlOf(path, value string) string {
	name, rest, nested := strings.Cut(path, ".")
	list := strings.HasSuffix(name, "[]")
	name = strings.TrimSuffix(name, "[]")
	if nested {
		value = "{" + yamlOf(rest, value) + "}"
	}
	if list {
		value = "[" + value + "]"
	}
	return name + ": " + value
}

// valueOf is a value of a field that is not its default.
func valueOf(t *testing.T, path string) string {
	t.Helper()
	typ := reflect.TypeFor[Config]()
	var f reflect.StructField
	for name := range strings.SplitSeq(path, ".") {
		var ok bool
		if f, ok = fieldsOf(typ).find(strings.TrimSuffix(name, "[]")); !ok {
			t.Fatalf("no field %s", path)
		}
		if typ = f.Type; strings.HasSuffix(name, "[]") {
			typ = typ.Elem()
		}
	}
	switch {
	case f.Tag.Get("oneof") != "":
		words := strings.Fields(f.Tag.Get("oneof"))
		return words[len(words)-1]
	case f.Type == reflect.TypeFor[time.Duration]():
		return "7s"
	case f.Tag.Get("unit") == "bytes":
		return "9MiB"
	}
	switch f.Type.Kind() {
	case reflect.Bool:
		if path == "pd.decode_only_fallback" {
			return "false"
		}
		return "true"
	case reflect.Float64:
		return "0.25"
	case reflect.Int, reflect.Int64:
		if path == "transfers.completion_slots" {
			return "128"
		}
		return "7"
	}
	return "127.0.0.1"
}

// sameValues says whether two configurations have the same values.
func sameValues(a, b *Config) bool {
	x, y := *a, *b
	x.origins, x.reparse, x.inputWarnings, y.origins, y.reparse, y.inputWarnings = nil, nil, nil, nil, nil, nil
	return reflect.DeepEqual(x, y)
}

// Every old name sets what the new one sets, by each way in, with warnings that give the new
// name; both in one place are an error that names both.
func TestRenamedFields(t *testing.T) {
	renamed := RenamedFields()
	if len(renamed) < 50 {
		t.Fatalf("only %d renamed fields", len(renamed))
	}
	for _, r := range renamed {
		value := valueOf(t, r.New)
		file := func(text string) (*Config, error) {
			var errs errorList
			c := read("f", []byte(text), &errs)
			return c, errs.err()
		}
		want, err := file(yamlOf(r.New, value))
		if err != nil || sameValues(want, Default()) || len(want.inputWarnings) > 0 {
			t.Fatalf("%s: %v %q; want a value other than the default, without warnings", r.New, err, want.inputWarnings)
		}
		got, err := file(yamlOf(r.Old, value))
		if err != nil || !sameValues(got, want) {
			t.Errorf("file, %s: %v; want the value of %s", r.Old, err, r.New)
		}
		// One warning for each part of the path that has a new name.
		old, present := strings.Split(r.Old, "."), strings.Split(r.New, ".")
		n := 0
		for i := range old {
			if old[i] != present[i] {
				if n++; len(got.inputWarnings) < n || !strings.HasSuffix(strings.SplitN(got.inputWarnings[n-1], ";", 2)[0], present[i]) {
					t.Errorf("file, %s: warnings %q; want one of %s", r.Old, got.inputWarnings, present[i])
				}
			}
		}
		if len(got.inputWarnings) != n {
			t.Errorf("file, %s: warnings %q; want %d", r.Old, got.inputWarnings, n)
		}
		if strings.Contains(r.Old, "[]") {
			continue
		}
		for _, way := range []struct {
			name string
			set  func(paths ...string) (*Config, error)
		}{
			{"environment", func(paths ...string) (*Config, error) {
				c, errs := Default(), errorList{}
				var environ []string
				for _, p := range paths {
					environ = append(environ, envName(p)+"="+value)
				}
				c.applyEnv(environ, &errs)
				return c, errs.err()
			}},
			{"--set", func(paths ...string) (*Config, error) {
				c, errs, f := Default(), errorList{}, Flags{}
				for _, p := range paths {
					f.sets = append(f.sets, setting{"--set", p, value})
				}
				f.applySets(c, &errs)
				return c, errs.err()
			}},
		} {
			c, err := way.set(r.Old)
			if err != nil || !sameValues(c, want) {
				t.Errorf("%s, %s: %v; want the value of %s", way.name, r.Old, err, r.New)
			}
			shown := []string{r.Old, r.New}
			if way.name == "environment" {
				shown = []string{envName(r.Old), envName(r.New)}
			}
			if len(c.inputWarnings) != 1 || !strings.Contains(c.inputWarnings[0], shown[0]+" is now named "+shown[1]+";") {
				t.Errorf("%s, %s: warnings %q; want one that names %s", way.name, r.Old, c.inputWarnings, shown[1])
			}
			if _, err := way.set(r.Old, r.New); err == nil || !strings.Contains(err.Error(), shown[0]) || !strings.Contains(err.Error(), shown[1]) {
				t.Errorf("%s, %s and %s: %v; want an error that names both", way.name, r.Old, r.New, err)
			}
			if c, err := way.set(r.New); err != nil || len(c.inputWarnings) > 0 {
				t.Errorf("%s, %s: %v, %q; want no warning", way.name, r.New, err, c.inputWarnings)
			}
		}
	}
}

// In a file, both names of a field or of a group are an error with the place of the second.
func TestRenamedTwice(t *testing.T) {
	for text, want := range map[string]string{
		"pd:\n  cut_after: 1s\n  abort_delay: 1s\n":                            "f:3:3: pd.abort_delay: given as abort_delay and by its old name cut_after",
		"engine_api: {http: true}\nrouted: {http: true}\n":                     "f:2:1: engine_api: given as engine_api and by its old name routed",
		"models:\n  m:\n    pd:\n      abort_delay: 1s\n      cut_after: 2s\n": "f:5:7: models.m.pd.abort_delay: given as abort_delay and by its old name cut_after",
	} {
		if _, err := Parse("f", []byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v; want %s", text, err, want)
		}
	}
	c, err := Parse("f", []byte("pd: {cut_after: 1s}\nmodels:\n  a: {pd: {cut_after: 2s}}\n"))
	if err != nil || c.Models["a"].PD.AbortDelay != 2*time.Second {
		t.Errorf("%v; want the old name for a model, too", err)
	}
	if n := len(slices.DeleteFunc(c.Warnings(), func(w string) bool { return !strings.Contains(w, "abort_delay") })); n != 1 {
		t.Errorf("%d warnings; want one for each old name: %q", n, c.Warnings())
	}
}

// A word of migration.allow that has a new name is replaced by it, with a warning.
func TestRenamedValue(t *testing.T) {
	c, err := Parse("f", []byte("migration: {allow: [many_choices, stop]}\n"))
	if err != nil || !slices.Equal(c.Migration.Allow, []string{"multiple_choices", "stop"}) {
		t.Fatalf("%v, %q; want multiple_choices, stop", err, c.Migration.Allow)
	}
	if w := c.InputWarnings(); len(w) != 1 || !strings.Contains(w[0], "many_choices is now named multiple_choices") {
		t.Errorf("warnings %q; want one that names both words", w)
	}
}

// docs/upgrading.md has the table of all renamed fields; -rewrite writes it.
func TestUpgradingTable(t *testing.T) {
	const path, head = "../../docs/upgrading.md", "## Configuration keys\n"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), head)
	intro, rest, found2 := strings.Cut(rest, "| --- | --- |\n")
	if !found || !found2 {
		t.Fatalf("%s has no table of configuration keys", path)
	}
	for strings.HasPrefix(rest, "|") {
		_, rest, _ = strings.Cut(rest, "\n")
	}
	var rows strings.Builder
	for _, r := range RenamedFields() {
		rows.WriteString("| `" + r.Old + "` | `" + r.New + "` |\n")
	}
	want := before + head + intro + "| --- | --- |\n" + rows.String() + rest
	if *rewrite {
		if err := os.WriteFile(path, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(text) != want {
		t.Errorf("%s is out of date; run: go test ./router/config -run TestUpgradingTable -rewrite", path)
	}
}
