package engineapi

import (
	"errors"
	"runtime"
	"strings"
	"testing"
)

// TestHostsAllow: a wide allowed network does not include this machine's own services or a
// cloud's metadata service.
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

// TestHostsInsideAllowedValues: values that begin with an allowed host, but lead an engine to
// another host once the engine writes them into a URL or an address.
func TestHostsInsideAllowedValues(t *testing.T) {
	h, err := newHosts([]string{"10.0.0.0/8", "fd00::/8", "prefill.local"})
	if err != nil {
		t.Fatal(err)
	}
	const in = "prefill_result.disaggregated_params"
	for _, k := range []struct {
		params string
		field  string // "": the value is accepted
	}{
		{`{"kv_transfer_params":{"remote_host":"10.1.2.3","remote_port":5600,"remote_block_ids":[1,2]}}`, ""},
		{`{"remote_host":"10.1.2.3:5600"}`, ""},
		{`{"remote_host":"[fd00::1]:5600"}`, ""},
		{`{"remote_host":"fd00::1"}`, ""},
		{`{"remote_bootstrap_addr":"http://10.1.2.3:8998"}`, ""},
		{`{"ctx_info_endpoint":["tcp://prefill.local:1","tcp://[fd00::2]:2"]}`, ""},
		{`{"host_block_ids":[7],"num_hosts_seen":1,"receiver_host":null}`, ""},
		{`{"remote_host":"10.1.2.3:x@other"}`, ".remote_host"},
		{`{"remote_host":"10.1.2.3:80;other"}`, ".remote_host"},
		{`{"remote_host":"10.1.2.3:99999"}`, ".remote_host"},
		{`{"remote_host":"other://10.1.2.3"}`, ".remote_host"},
		{`{"remote_host":"http://10.1.2.3"}`, ".remote_host"},
		{`{"remote_ip":"other://10.1.2.3"}`, ".remote_ip"},
		{`{"remote_host":"fd00::1%@other"}`, ".remote_host"},
		{`{"url":"http://[fd00::1%25@other]:80/"}`, ".url"},
		{`{"url":"tcp://10.1.2.3:5600;other:5600"}`, ".url"},
		{`{"url":"http://10.1.2.3:80@other/"}`, ".url"},
		{`{"remote_host":2130706433}`, ".remote_host"},
		{`{"peer":"tcp:\/\/other:1"}`, ".peer"},
		{`{"encoded_opaque_state":"AAEC"}`, ".encoded_opaque_state"},
		{`{"peer":{"hosts":["10.1.2.3",2130706433]}}`, ".peer.hosts[1]"},
	} {
		want := k.field
		if want != "" {
			want = in + want
		}
		got := ""
		if err := prefixField(in, h.checkTree(place{}, []byte(k.params))); err != nil {
			f := new(FieldError)
			if !errors.As(err, &f) || !f.Forbidden {
				t.Errorf("%s: %v", k.params, err)
			}
			got = f.Field
		}
		if got != want {
			t.Errorf("%s: refused for %q, want %q", k.params, got, want)
		}
	}
	if h, err = newHosts([]string{"0.0.0.0/0"}); err != nil {
		t.Fatal(err)
	}
	if err := h.checkTree(place{}, []byte(`{"encoded_opaque_state":"AAEC"}`)); err != nil {
		t.Errorf("with any host allowed: %v", err)
	}
}

// TestHostsCheckIsLinear: callers choose the length of a member's name, so the check must not
// copy or analyse the name once per element.
func TestHostsCheckIsLinear(t *testing.T) {
	h, err := newHosts([]string{"10.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	const n = 20_000
	name := strings.Repeat("a", 200_000)
	for _, k := range []struct{ what, element string }{{"numbers", "1,"}, {"strings", `"x",`}, {"lists", "[1],"}} {
		body := []byte(`{"` + name + `":[` + strings.Repeat(k.element, n) + `"http://192.0.2.1/"]}`)
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := h.checkTree(place{}, body)
		runtime.ReadMemStats(&after)
		if got := after.TotalAlloc - before.TotalAlloc; got > 16<<20 {
			t.Errorf("%s: the check of %d bytes allocated %d bytes", k.what, len(body), got)
		}
		var f *FieldError
		if !errors.As(err, &f) || !f.Forbidden || len(f.Field) > maxFieldPath+len("…") {
			t.Errorf("%s: got %.200v, want a forbidden field with a bounded path", k.what, err)
		}
	}
}
