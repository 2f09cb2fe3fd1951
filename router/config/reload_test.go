package config

import (
	"encoding/json"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func parsed(t *testing.T, text string) *Config {
	t.Helper()
	c, err := Parse("sluice.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

const reloadBase = `
admin: {token: "0123456789abcdef"}
timeouts: {prefill: 60s}
api_keys: [{name: a, sha256: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", requests_per_minute: 5}]
workers:
  - {id: p, url: "http://10.0.0.1:8000", role: prefill, labels: [x]}
  - {url: "http://10.0.0.2:8000", role: decode}
models: {m: {pd: {lease: 20s}}}
`

func TestChanges(t *testing.T) {
	old := parsed(t, reloadBase)
	next := parsed(t, `
listen: 127.0.0.1:9090
admin: {token: "fedcba9876543210"}
timeouts: {prefill: 90s, connect: 3s}
steering: {pinning: [10.0.0.0/8, "127.0.0.1/32"]}
limits: {max_body: 16MiB, max_head: 32KiB}
cors: {origins: "*"}
api_keys: [{name: a, sha256: "60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752", requests_per_minute: 6}, {name: b, sha256: "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"}]
workers:
  - {id: p, url: "http://10.0.0.1:8000", role: prefill, labels: [x, y]}
  - {url: "http://10.0.0.3:8000", role: decode}
models: {m: {pd: {lease: 25s}}}
`)
	var got []string
	for _, c := range old.Changes(next) {
		got = append(got, string(c.Effect)+" "+c.Path+": "+c.Old+" -> "+c.New)
	}
	want := []string{
		`restart listen: 127.0.0.1:8080 -> 127.0.0.1:9090`,
		`restart admin.token: (hidden) -> (hidden)`,
		`applied cors.origins:  -> [*]`,
		`applied api_keys["a"].sha256: (hidden) -> (hidden)`,
		`applied api_keys["a"].requests_per_minute: 5 -> 6`,
		`applied api_keys["b"]:  -> {name: b, sha256: (hidden)}`,
		`applied workers["p"].labels: [x] -> [x, y]`,
		`applied workers["http://10.0.0.2:8000"]: {url: http://10.0.0.2:8000, role: decode} -> `,
		`applied workers["http://10.0.0.3:8000"]:  -> {url: http://10.0.0.3:8000, role: decode}`,
		`applied models["m"].pd.lease: 20s -> 25s`,
		`applied limits.max_body: 32MiB -> 16MiB`,
		`restart limits.max_head: 16KiB -> 32KiB`,
		`applied timeouts.connect: 2s -> 3s`,
		`applied timeouts.prefill: 1m -> 1m30s`,
		`applied steering.pinning: [unix] -> [10.0.0.0/8, 127.0.0.1/32]`,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
	if d := next.Changes(next); len(d) > 0 {
		t.Errorf("from itself: %v", d)
	}

	merged, err := old.Apply(next)
	if err != nil {
		t.Fatal(err)
	}
	left := merged.Changes(next)
	for _, c := range left {
		if c.Effect != Restart {
			t.Errorf("not applied: %+v", c)
		}
	}
	if len(left) != 3 || merged.Timeouts.Prefill != 90*time.Second || merged.Timeouts.Connect != 3*time.Second || merged.Limits.MaxHead != 16<<10 || merged.Listen != "127.0.0.1:8080" || len(merged.Workers) != 2 {
		t.Errorf("applied: %v", left)
	}
	if old.Timeouts.Prefill != time.Minute || old.Workers[0].Labels[0] != "x" || len(old.APIKeys) != 1 || old.Models["m"].PD.Lease != 20*time.Second {
		t.Error("what ran before was changed")
	}
}

// TestApplyTakesListsOfEntries: a running router takes over every list of entries, or it is said why not.
// Such lists, unlike other fields, are not found by the paths of print-defaults.
func TestApplyTakesListsOfEntries(t *testing.T) {
	lists := 0
	forAll(reflect.ValueOf(Default()).Elem(), "", func(path string, v reflect.Value, _ reflect.StructTag) {
		if !hasEntries(v) {
			return
		}
		lists++
		next := Default()
		field, why := at(next, path), restartReason(path)
		switch v.Kind() {
		case reflect.Slice:
			field.Set(reflect.MakeSlice(v.Type(), 1, 1))
			if name := field.Index(0).FieldByName("Name"); name.IsValid() {
				name.SetString("a")
			}
			if path == "workers" {
				next.Workers[0].URL = "http://10.0.0.1:8000"
			}
		case reflect.Map:
			field.Set(reflect.MakeMap(v.Type()))
			field.SetMapIndex(reflect.ValueOf("a").Convert(v.Type().Key()), reflect.New(v.Type().Elem()).Elem())
		case reflect.Pointer:
			field.Set(reflect.New(v.Type().Elem()))
		}
		if path == "api_keys" || path == "models" { // it depends on the change: TestEnablingKeysNeedsRestart, TestChangingFamilyNeedsRestart
			return
		}
		now := Default()
		merged, err := now.Apply(next)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			return
		}
		if applied := reflect.DeepEqual(at(merged, path).Interface(), field.Interface()); applied != (why == "") {
			t.Errorf("%s: applied is %v, and the reason against it is %q", path, applied, why)
		}
		for _, c := range now.Changes(next) {
			if strings.HasPrefix(c.Path, path) && (c.Effect == Applied) != (why == "") {
				t.Errorf("%+v; the reason against it is %q", c, why)
			}
		}
	})
	if lists < 6 {
		t.Errorf("%d lists of entries; want all of them", lists)
	}
}

// TestApplyClasses: classes are replaced, together with what refers to them, and changes name them.
func TestApplyClasses(t *testing.T) {
	old := parsed(t, "admission: {default_class: low, classes: [{name: high}, {name: low, max_wait: 1s}]}")
	next := parsed(t, "admission: {default_class: batch, classes: [{name: low, min_share: 0.2}, {name: high}, {name: batch, priorities: [1..9]}]}")
	merged, err := old.Apply(next)
	if err != nil {
		t.Fatal(err)
	}
	if left := merged.Changes(next); len(left) > 0 {
		t.Errorf("not applied: %v", left)
	}
	var got []string
	for _, c := range old.Changes(next) {
		got = append(got, string(c.Effect)+" "+c.Path+": "+c.Old+" -> "+c.New)
	}
	want := []string{
		`applied admission.default_class: low -> batch`,
		`applied admission.classes: [high, low] -> [low, high, batch]`,
		`applied admission.classes["low"].min_share: 0 -> 0.2`,
		`applied admission.classes["low"].max_wait: 1s -> 0s`,
		`applied admission.classes["batch"]:  -> {name: batch, priorities: [1..9]}`,
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
	if old.Admission.Classes[0].Name != "high" {
		t.Error("what ran before was changed")
	}
}

// Fields that need a restart stay unchanged, and new fields must be consistent with them.
func TestApplyChecksMergedConfig(t *testing.T) {
	const socket = "engine_api: {unix_socket: /run/s}\n"
	old := parsed(t, socket+"limits: {max_body: 1MiB}") // and frames of 8 MiB
	_, err := old.Apply(parsed(t, "engine_api: {unix_socket: /run/s, max_frame: 1MiB}\nlimits: {max_body: 1MiB, memory_budget: 4MiB}"))
	if err == nil || !strings.Contains(err.Error(), "engine_api.max_frame") || !strings.Contains(err.Error(), "sluice restart") {
		t.Errorf("%v", err)
	}
}

func TestEnablingKeysNeedsRestart(t *testing.T) {
	none, some := parsed(t, ""), parsed(t, reloadBase)
	for _, d := range [][]Change{none.Changes(some), some.Changes(none)} {
		found := false
		for _, c := range d {
			if strings.HasPrefix(c.Path, "api_keys") {
				found = true
				if c.Effect != Restart {
					t.Errorf("%+v", c)
				}
			}
		}
		if !found {
			t.Errorf("no key in %v", d)
		}
	}
}

// A family that the running router was not started with needs what belongs to it.
func TestChangingFamilyNeedsRestart(t *testing.T) {
	const workers = `workers: [{url: "http://10.0.0.1:1", role: prefill}, {url: "http://10.0.0.2:1", role: decode}]` + "\n"
	old := parsed(t, workers+"models: {m: {pd: {lease: 20s}}}")
	for _, text := range []string{
		"pd: {family: storage}\nmodels: {m: {pd: {lease: 20s}}}",
		"models: {m: {pd: {family: storage, lease: 40s}}}",
		"models: {m: {pd: {lease: 20s}}, n: {pd: {lease: 40s}}}",
		"",
	} {
		next := parsed(t, workers+text)
		merged, err := old.Apply(next)
		if err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(merged.Models, old.Models) || merged.PD.Family != old.PD.Family {
			t.Errorf("%s: models %v, family %s", text, merged.Models, merged.PD.Family)
		}
		for _, c := range old.Changes(next) {
			if c.Effect != Restart {
				t.Errorf("%s: %+v", text, c)
			}
		}
	}
	// The first prefill worker makes the family; it waits for the restart.
	old = parsed(t, `workers: [{url: "http://10.0.0.2:1", role: decode}]`)
	merged, err := old.Apply(parsed(t, workers))
	if err != nil || merged.PD.Family != "off" || len(merged.Workers) != 2 {
		t.Errorf("%v, %+v", err, merged)
	}
}

// A field is taken over by a running router, or it is said why not; never both.
func TestRestartOnlyFieldsHaveReasons(t *testing.T) {
	var paths []string
	forEachField(reflect.ValueOf(Default()).Elem(), "", func(path string, _ reflect.Value, _ reflect.StructTag) { paths = append(paths, path) })
	for _, p := range paths {
		switch why := restartReason(p); {
		case !Reloadable(p) && why == "":
			t.Errorf("%s is not taken over, and nothing says why", p)
		case Reloadable(p) && slices.ContainsFunc(restartOnly, func(f restartOnlyFields) bool { return slices.Contains(f.paths, p) }):
			t.Errorf("%s is taken over, and it is said why not: %s", p, why)
		}
	}
	for _, f := range restartOnly {
		for _, p := range f.paths {
			if !slices.ContainsFunc(paths, func(path string) bool { return (path == p || strings.HasPrefix(path, p+".")) && !Reloadable(path) }) {
				t.Errorf("%q is not a field that needs a new process", p)
			}
		}
	}
	for _, c := range parsed(t, reloadBase).Changes(parsed(t, "listen: 127.0.0.1:1")) {
		if (c.Reason != "") != (c.Effect == Restart) {
			t.Errorf("%+v", c)
		}
	}
}

// Every path of the table is a field, or a group of them.
func TestReloadablePathsAreFields(t *testing.T) {
	var paths []string
	forEachField(reflect.ValueOf(Default()).Elem(), "", func(path string, _ reflect.Value, _ reflect.StructTag) { paths = append(paths, path) })
	for _, l := range reloadable {
		found := false
		for _, p := range paths {
			found = found || p == l || strings.HasPrefix(p, l+".")
		}
		if !found {
			t.Errorf("%q is not a field", l)
		}
	}
}

// TestChangeFormerMember: JSON has a change's reason also as why, its name in the previous release,
// and is read with either name.
func TestChangeFormerMember(t *testing.T) {
	change := Change{Path: "listen", Old: "a", New: "b", Effect: Restart, Reason: "sockets are open", Warning: "w"}
	const both = `{"path":"listen","old":"a","new":"b","effect":"restart","reason":"sockets are open","warning":"w","why":"sockets are open"}`
	text, err := json.Marshal([]Change{change})
	if err != nil || string(text) != "["+both+"]" {
		t.Errorf("%v, %s\nwant [%s]", err, text, both)
	}
	for _, text := range []string{both, strings.Replace(both, `"reason":"sockets are open",`, "", 1), strings.Replace(both, `,"why":"sockets are open"`, "", 1)} {
		var got Change
		if err := json.Unmarshal([]byte(text), &got); err != nil || got != change {
			t.Errorf("%s: %v, %+v; want %+v", text, err, got, change)
		}
	}
	if text, _ := json.Marshal(Change{Effect: Applied}); string(text) != `{"path":"","old":"","new":"","effect":"applied"}` {
		t.Errorf("a change without a reason: %s", text)
	}
}

// TestReloadTable: the section of ARCHITECTURE.md on a reload during a request names each reloadable
// field or its group, so that it says what a request in flight sees of it.
func TestReloadTable(t *testing.T) {
	text, err := os.ReadFile("../../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n### A reload during a request\n")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, path := range reloadable {
		group, _, _ := strings.Cut(path, ".")
		if !strings.Contains(section, "`"+path+"`") && !strings.Contains(section, "`"+group+"`") {
			t.Errorf("ARCHITECTURE.md does not say what a request in flight sees of a new %s", path)
		}
	}
}
