package main

import (
	"bytes"
	"io"
	"regexp"
	"strings"
	"testing"

	"sluice/router/apikey"
	"sluice/router/config"
)

func TestKeyCommand(t *testing.T) {
	var out, errs bytes.Buffer
	if code := runArgs("key", []string{"--name", "team-a"}, &out, &errs); code != 0 {
		t.Fatal(errs.String())
	}
	key := regexp.MustCompile(`shown this once: (\S+)`).FindStringSubmatch(out.String())
	if key == nil {
		t.Fatalf("no key in %s", out.String())
	}
	cfg, err := config.Parse("printed", out.Bytes())
	if err != nil {
		t.Fatalf("the output is not a configuration: %v", err)
	}
	if len(cfg.APIKeys) != 1 || cfg.APIKeys[0].Name != "team-a" || cfg.APIKeys[0].SHA256 != apikey.HashOf(key[1]).String() {
		t.Errorf("%+v", cfg.APIKeys)
	}
	out.Reset()
	if code := runWithInput(t.Context(), []string{"key", "--hash"}, strings.NewReader(key[1]+"\n"), &out, &errs); code != 0 || !strings.Contains(out.String(), apikey.HashOf(key[1]).String()) || strings.Contains(out.String(), key[1]) {
		t.Errorf("%d %s %s", code, out.String(), errs.String())
	}
	for _, args := range [][]string{{"sk-sluice-on-the-command-line"}, {"--hash"}, {"--nmae", "x"}} {
		errs.Reset()
		if code := runWithInput(t.Context(), append([]string{"key"}, args...), strings.NewReader("\n"), io.Discard, &errs); code != 2 || errs.Len() == 0 {
			t.Errorf("%v: code %d, %q", args, code, errs.String())
		}
	}
}
