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
