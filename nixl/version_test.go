package nixl

import "testing"

func TestMismatch(t *testing.T) {
	for _, c := range []struct {
		ours, theirs string
		apart        bool
	}{
		{"1.5.1", "NIXL 1.5.1", false},
		{"1.5.1", "NIXL 1.4.0", false},
		{"1.5.1", "1.3.2", true},
		{"1.3.2", "NIXL 1.5.1", true},
		{"1.4.1", "NIXL 0.10.1", true},
		{"1.3.2", "NIXL 1.0.1", false},
		{"2.0.0", "NIXL 1.3.2", true},
		{"unknown", "NIXL 1.3.2", false},
		{"1.5.1", "", false},
		{"1.5.1", "NIXL x.y", false},
		{"1.5.1", "UCX 1.21", false},
	} {
		if got := mismatch(c.ours, c.theirs); (got != "") != c.apart {
			t.Errorf("%q and %q: %q, want apart %v", c.ours, c.theirs, got, c.apart)
		}
	}
}
