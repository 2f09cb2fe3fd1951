package config

import (
	"strings"
	"testing"
)

// Ranks that would hear each other's events, or ask for replays where events are, are
// warned of; those that have places of their own are not.
func TestSharedEventEndpoints(t *testing.T) {
	const a = "workers: [{url: 'http://h:1', kv_events: ['tcp://h:5557']}, "
	for text, want := range map[string]string{
		a + "{url: 'http://h:2', kv_events: ['tcp://h:5557']}]":                                                                                       "workers[1].kv_events: tcp://h:5557 is also in workers[0].kv_events",
		a + "{url: 'http://h:2', kv_events: ['tcp://*:5556'], ranks: [0, 1]}]":                                                                        "tcp://h:5557 is also in",
		a + "{url: 'http://h:2', kv_events: ['tcp://h:5600'], kv_replay: ['tcp://h:5557']}]":                                                          "workers[1].kv_replay: tcp://h:5557",
		"workers: [{url: 'http://h:1', ranks: [0, 1, 2, 3], kv_events: ['tcp://*:5557'], kv_replay: ['tcp://*:5560']}]":                               "workers[0].kv_replay: tcp://h:5560 is also in workers[0].kv_events",
		"workers: [{url: 'http://h:1', kv_events: ['bind:tcp://0.0.0.0:5557']}]":                                                                      "trusts every peer that connects",
		a + "{url: 'http://g:2', kv_events: ['tcp://*:5557']}]":                                                                                       "",
		a + "{url: 'http://h:2', kv_events: ['tcp://h:5558'], kv_replay: ['tcp://h:5657']}]":                                                          "",
		"workers: [{url: 'http://h:1', ranks: [0, 1], kv_events: ['tcp://h:5557', 'tcp://h:5557']}]":                                                  "", // distinguished by the rank in each batch
		"workers: [{url: 'http://h:1', kv_events: ['bind:tcp://127.0.0.1:5557']}, {url: 'http://h:2', kv_events: ['ipc:///x']}, {url: 'http://h:3'}]": "",
	} {
		got := strings.Join(mustParseText(t, "listen: 127.0.0.1:1\npd: {family: off}\n"+text).Warnings(), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: warned of %q, want %q", text, got, want)
		}
	}
}
