package app

import (
	"strings"
	"testing"

	"sluice/router/config"
	"sluice/router/worker"
)

// TestOwnAddressIsNoWorker: a configuration that names one of the router's own listeners as a worker
// is refused, by the check and at the start.
func TestOwnAddressIsNoWorker(t *testing.T) {
	for listen, url := range map[string]string{
		"127.0.0.1:18431": "http://localhost:18431",
		"0.0.0.0:18431":   "http://127.0.0.1:18431",
	} {
		c := config.Default()
		c.Listen, c.Admin.Listen = listen, "off"
		c.Workers = []config.Worker{{ID: "own", URL: url, Role: worker.Aggregated}}
		problems := CheckStart(c)
		if len(problems) != 1 || !strings.Contains(problems[0].Error(), `"own": url: "`+url+`" is the address of this router's own listener (listen `) {
			t.Errorf("%s, %s: %v", listen, url, problems)
		}
		r, err := New(Options{Config: c})
		if err == nil {
			r.Close()
		}
		if err == nil || !strings.Contains(err.Error(), "own listener") {
			t.Errorf("%s, %s: started with %v", listen, url, err)
		}
		c.Workers[0].URL = "http://127.0.0.1:18432"
		if problems := CheckStart(c); len(problems) > 0 {
			t.Errorf("another port: %v", problems)
		}
	}
}

// TestAccessLogOfMissingFolder: the check and the start name the field of an access log that cannot be
// opened, and its place in the file.
func TestAccessLogOfMissingFolder(t *testing.T) {
	const text = "listen: 127.0.0.1:0\nadmin: {listen: off}\naccess_log:\n  output: file:/nonexistent/folder/access.log\n"
	const want = "f.yaml:4:11: access_log.output: "
	c, err := config.Parse("f.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if problems := CheckStart(c); len(problems) != 1 || !strings.HasPrefix(problems[0].Error(), want) {
		t.Errorf("the check found %v", problems)
	}
	r, err := New(Options{Config: c})
	if err == nil {
		r.Close()
	}
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("started with %v", err)
	}
	c.AccessLog.Output = "file:" + t.TempDir() + "/access.log"
	if problems := CheckStart(c); len(problems) > 0 {
		t.Errorf("an existing folder: %v", problems)
	}
}
