package networks

import (
	"net/netip"
	"testing"
)

func TestContains(t *testing.T) {
	for _, k := range []struct {
		network, address string
		want             bool
	}{
		{"10.0.0.0/8", "10.1.2.3", true},
		{"10.0.0.0/8", "11.1.2.3", false},
		{"10.0.0.0/8", "::ffff:10.1.2.3", true},
		{"0.0.0.0/0", "8.8.8.8", true},
		{"::/0", "2001:db8::1", true},
		{"0.0.0.0/0", "169.254.169.254", false},
		{"0.0.0.0/0", "::ffff:169.254.169.254", false},
		{"169.0.0.0/8", "169.254.169.254", false},
		{"169.254.0.0/16", "169.254.169.254", true},
		{"169.254.169.0/24", "169.254.169.254", true},
		{"::/0", "fe80::1", false},
		{"::/0", "64:ff9b::a9fe:a9fe", false},
		{"::/0", "64:ff9b::7f00:1", false},
		{"::/0", "2002:7f00:1::", false},
		{"::/0", "2002:a9fe:a9fe::1", false},
		{"::/0", "::127.0.0.1", false},
		{"::/0", "64:ff9b::808:808", true},
		{"127.0.0.0/8", "64:ff9b::7f00:1", true},
		{"fe00::/8", "fe80::1", false},
		{"fe80::/10", "fe80::1", true},
		{"fe80::/10", "fe80::1%eth0", false},
		{"0.0.0.0/0", "127.0.0.1", false},
		{"127.0.0.0/8", "127.0.0.1", true},
		{"::/0", "::1", false},
		{"::1/128", "::1", true},
		{"0.0.0.0/0", "0.0.0.0", false},
		{"0.0.0.0/32", "0.0.0.0", false},
		{"::/128", "::", false},
		{"0.0.0.0/0", "224.0.0.1", false},
		{"224.0.0.0/4", "239.1.1.1", false},
		{"ff00::/8", "ff02::1", false},
		{"0.0.0.0/0", "255.255.255.255", false},
	} {
		if got := Contains([]netip.Prefix{netip.MustParsePrefix(k.network)}, netip.MustParseAddr(k.address)); got != k.want {
			t.Errorf("%s in %s: %v, want %v", k.address, k.network, got, k.want)
		}
	}
	if Contains(nil, netip.MustParseAddr("10.0.0.1")) || IsUnicastHost(netip.Addr{}) {
		t.Error("nothing allows something")
	}
	both := []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("169.254.7.0/24")}
	if !Contains(both, netip.MustParseAddr("169.254.7.1")) || Contains(both, netip.MustParseAddr("169.254.169.254")) {
		t.Error("a narrower network beside a wide one")
	}
}
