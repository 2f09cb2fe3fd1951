package worker

import "testing"

func TestReleases(t *testing.T) {
	at := func(version string) *Rank {
		w := New(Spec{ID: "w", URL: "http://h"})
		w.SetInfo(&Info{Version: version})
		return w.Ranks[0]
	}
	for _, k := range []struct {
		version        string
		atLeast, older bool // of 0.5.10
	}{
		{"", false, false}, {"garbage", false, true}, {"0.5.9", false, true}, {"0.5.9.post2", false, true}, {"0.5.10", true, false},
		{"v0.5.10rc1", true, false}, {"0.6", true, false}, {"1", true, false}, {"0.5", false, true}, {"0.32.0+cpu", true, false}, {"0.4.6.post5", false, true},
	} {
		if r := at(k.version); r.VersionAtLeast(0, 5, 10) != k.atLeast || r.VersionBefore(0, 5, 10) != k.older {
			t.Errorf("%q: at least 0.5.10 %v, older %v; want %v, %v", k.version, r.VersionAtLeast(0, 5, 10), r.VersionBefore(0, 5, 10), k.atLeast, k.older)
		}
	}
}

func TestHosts(t *testing.T) {
	for url, want := range map[string]string{
		"http://h:1": "h", "http://h": "h", "https://h:1/x/y": "h", "http://[::1]:8200": "[::1]", "http://[fe80::1]": "[fe80::1]",
	} {
		if got := (&Rank{URL: url}).Host(); got != want {
			t.Errorf("host of %s is %q, want %q", url, got, want)
		}
	}
}

func TestRankOption(t *testing.T) {
	w := New(Spec{ID: "p", URL: "http://h", Ranks: []uint16{4, 5}, Options: map[string][]string{"one": {"a"}, "each": {"a", "b"}}})
	if a, b, c := w.Ranks[1].Option("one"), w.Ranks[1].Option("each"), w.Ranks[1].Option("none"); a != "a" || b != "b" || c != "" {
		t.Errorf("options of the second rank are %q, %q, %q; want a, b and none", a, b, c)
	}
}
