package main

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"sluice/router/e2e/harness"
)

// checkDefaults checks that the router accepts a file of the printed defaults.
func checkDefaults(t *testing.T, name, content string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	harness.WriteFile(t, path, content)
	var out, errs bytes.Buffer
	if code := runArgs("check", []string{"--config", path, "--engine", "http://127.0.0.1:1"}, &out, &errs); code != 0 {
		t.Errorf("check of %s: exit %d: %s", name, code, &errs)
	}
}

// TestConfigCommands: sluice check accepts the printed defaults, and the schema is JSON.
func TestConfigCommands(t *testing.T) {
	var out, errs bytes.Buffer
	if code := runArgs("config", []string{"print-defaults"}, &out, &errs); code != 0 || !strings.Contains(out.String(), "\n  prefill: 5m\n") {
		t.Fatalf("print-defaults: exit %d: %s%s", code, &out, &errs)
	}
	checkDefaults(t, "defaults.yaml", out.String())
	out.Reset()
	var tree map[string]any
	if code := runArgs("config", []string{"print-defaults", "--json"}, &out, &errs); code != 0 || json.Unmarshal(out.Bytes(), &tree) != nil {
		t.Fatalf("print-defaults --json: exit %d: %.300s%s", code, &out, &errs)
	}
	if timeouts, _ := tree["timeouts"].(map[string]any); timeouts["prefill"] != "5m" {
		t.Errorf("print-defaults --json: %.300s; want timeouts.prefill 5m", &out)
	}
	checkDefaults(t, "defaults.json", out.String())
	out.Reset()
	if code := runArgs("config", []string{"schema"}, &out, &errs); code != 0 || !json.Valid(out.Bytes()) || !strings.Contains(out.String(), "2020-12") {
		t.Errorf("schema: exit %d: %.200s%s", code, &out, &errs)
	}
	for args, code := range map[string]int{"": 2, "--help": 0, "shema": 2, "schema x": 2} {
		var out, errs bytes.Buffer
		if got := runArgs("config", strings.Fields(args), &out, &errs); got != code || out.Len()+errs.Len() == 0 {
			t.Errorf("config %s: exit %d, want %d: %s%s", args, got, code, &out, &errs)
		}
	}
}
