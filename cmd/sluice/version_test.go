package main

import (
	"bytes"
	"context"
	"encoding/json"
	"runtime"
	"strings"
	"testing"
)

func TestVersion(t *testing.T) {
	defer func(v, c, d string) { version, commit, date = v, c, d }(version, commit, date)
	version, commit, date = "1.2.3", "0123abcd", "2026-01-02T03:04:05Z"
	var out, errs bytes.Buffer
	if code := run(context.Background(), []string{"version"}, &out, &errs); code != 0 {
		t.Fatalf("exit %d: %s", code, errs.String())
	}
	for _, want := range []string{"sluice 1.2.3\n", "commit  0123abcd 2026-01-02T03:04:05Z", runtime.Version(), "libzmq  4."} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in:\n%s", want, out.String())
		}
	}
	if code := run(context.Background(), []string{"version", "all"}, &out, &errs); code != 2 {
		t.Errorf("an argument: exit %d, want 2", code)
	}
}

func TestVersionJSON(t *testing.T) {
	defer func(v, c, d string) { version, commit, date = v, c, d }(version, commit, date)
	version, commit, date = "1.2.3", "0123abcd", "2026-01-02T03:04:05Z"
	v := readVersion()
	v.Libraries = []optionalLibrary{{"nixl", "off", "not found"}}
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]any{"version": "1.2.3", "commit": "0123abcd", "date": "2026-01-02T03:04:05Z", "go": runtime.Version(), "platform": runtime.GOOS + "/" + runtime.GOARCH} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
	libraries, _ := got["optional_libraries"].([]any)
	if len(libraries) != 1 || libraries[0].(map[string]any)["state"] != "off" {
		t.Errorf("optional_libraries: %v", got["optional_libraries"])
	}
}
