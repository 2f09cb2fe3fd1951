package routed

import "testing"

// What a caller may have an engine connect to: a wide network means hosts, and neither
// this machine's own services nor a cloud's secrets.
func TestHostsAllow(t *testing.T) {
	h, err := newHosts([]string{"0.0.0.0/0", "10.9.0.0/16", "169.254.7.1", "prefill.local"})
	if err != nil {
		t.Fatal(err)
	}
	for host, want := range map[string]bool{
		"10.1.2.3": true, "[::ffff:10.1.2.3]": true, "prefill.local": true, "PREFILL.local": true, "169.254.7.1": true,
		"169.254.169.254": false, "[::ffff:169.254.169.254]": false, "127.0.0.1": false, "0.0.0.0": false, "224.0.0.1": false, "255.255.255.255": false,
		"2001:db8::1": false, "other.local": false, "": false,
	} {
		if got := h.allow(host); got != want {
			t.Errorf("%q: %v, want %v", host, got, want)
		}
	}
	for _, bad := range []string{"", "http://10.0.0.1", "10.0.0.1:80", "a b"} {
		if _, err := newHosts([]string{bad}); err == nil {
			t.Errorf("%q was taken", bad)
		}
	}
}
