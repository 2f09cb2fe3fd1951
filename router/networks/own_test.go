package networks

import (
	"errors"
	"net"
	"os"
	"testing"
)

func TestOwnListeners(t *testing.T) {
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []struct {
		listener, url string
		want          bool
	}{
		{"127.0.0.1:8080", "http://127.0.0.1:8080", true},
		{"127.0.0.1:8080", "https://127.0.0.1:8080/x", true},
		{"127.0.0.1:8080", "http://localhost:8080", true},
		{"127.0.0.1:8080", "http://LOCALHOST.:8080", true},
		{"127.0.0.1:8080", "http://0.0.0.0:8080", true},
		{"127.0.0.1:8080", "http://[::]:8080", true},
		{"127.0.0.1:8080", "http://[::ffff:127.0.0.1]:8080", true},
		{"localhost:8080", "http://127.0.0.1:8080", true},
		{"127.0.0.1:8080", "http://127.0.0.1:8081", false},
		{"127.0.0.1:8080", "http://127.0.0.2:8080", false},
		{"127.0.0.1:8080", "http://10.0.0.7:8080", false},
		{"10.0.0.7:8080", "http://127.0.0.1:8080", false},
		{"10.0.0.7:8080", "http://10.0.0.7:8080", true},
		{"10.0.0.7:8080", "http://" + host + ":8080", true},
		{"0.0.0.0:8080", "http://127.0.0.1:8080", true},
		{"0.0.0.0:8080", "http://127.0.0.9:8080", true},
		{"0.0.0.0:8080", "http://[::1]:8080", true},
		{"0.0.0.0:8080", "http://10.0.0.7:8080", true},
		{":8080", "http://10.0.0.7:8080", true},
		{"[::]:8080", "http://10.0.0.7:8080", true},
		{"[::]:8080", "http://[fd00::7]:8080", true},
		{"[::]:8080", "http://[fe80::7%25eth0]:8080", true},
		{"[::]:8080", "http://10.0.0.8:8080", false},
		{":8080", "http://" + host + ":8080", true},
		{":8080", "http://engine.example:8080", false},
		{":80", "http://10.0.0.7", true},
		{":80", "https://10.0.0.7", false},
		{":443", "https://10.0.0.7", true},
		{"127.0.0.1:0", "http://127.0.0.1:0", false},
		{"off", "http://127.0.0.1:8080", false},
	} {
		own := OwnListeners{interfaces: func() ([]net.Addr, error) {
			var all []net.Addr
			for _, cidr := range []string{"127.0.0.1/8", "::1/128", "10.0.0.7/24", "fd00::7/64", "fe80::7/64"} {
				ip, n, err := net.ParseCIDR(cidr)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, &net.IPNet{IP: ip, Mask: n.Mask})
			}
			return all, nil
		}}
		own.Add("listen", k.listener)
		err := own.CheckURL("url", k.url)
		var refused *OwnAddressError
		if got := errors.As(err, &refused); got != k.want {
			t.Errorf("listener %s, worker %s: %v, want refused %v", k.listener, k.url, err, k.want)
		}
	}
	var none *OwnListeners
	if err := none.CheckURL("url", "http://127.0.0.1:1"); err != nil {
		t.Error(err)
	}
}
