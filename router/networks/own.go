package networks

import (
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strings"
)

// OwnListeners are the addresses at which this process listens. A worker there would send the
// router its own requests. Add must not be called concurrently with CheckURL.
type OwnListeners struct {
	listeners []ownListener
	// interfaces returns the addresses of this machine; nil: net.InterfaceAddrs.
	interfaces func() ([]net.Addr, error)
}

type ownListener struct {
	field string // of the configuration
	at    netip.AddrPort
}

// OwnAddressError reports that a URL leads to a listener of this process.
type OwnAddressError struct {
	Field, URL string
	Listener   string // the field that configures the listener, with its address
}

func (e *OwnAddressError) Error() string {
	return fmt.Sprintf("%s: %q is the address of this router's own listener (%s); want the address of an engine", e.Field, e.URL, e.Listener)
}

// Add adds a listener: HOST:PORT, where an empty host is a wildcard. It ignores an address that
// names no port yet, such as "off", and one whose host is a name other than localhost.
func (o *OwnListeners) Add(field, address string) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return
	}
	switch host {
	case "":
		host = "::"
	case "localhost":
		host = "127.0.0.1"
	}
	at, err := netip.ParseAddrPort(net.JoinHostPort(host, port))
	if err != nil || at.Port() == 0 {
		return
	}
	o.listeners = append(o.listeners, ownListener{field, netip.AddrPortFrom(at.Addr().Unmap().WithZone(""), at.Port())})
}

// CheckURL returns an *OwnAddressError if the URL in a field leads to one of the listeners. It
// resolves no names except localhost and the machine's own: any other name may lead elsewhere when
// it is used.
func (o *OwnListeners) CheckURL(field, raw string) error {
	u, err := url.Parse(raw)
	if err != nil || o == nil {
		return nil // an invalid URL is refused elsewhere
	}
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	for i := range o.listeners {
		l := &o.listeners[i]
		if fmt.Sprint(l.at.Port()) == port && o.leadsTo(l.at.Addr(), u.Hostname()) {
			return &OwnAddressError{Field: field, URL: raw, Listener: l.field + " " + l.at.String()}
		}
	}
	return nil
}

// leadsTo reports whether a connection to host reaches a listener at an address. A wildcard
// listener has all addresses of this machine, of both families.
func (o *OwnListeners) leadsTo(listener netip.Addr, host string) bool {
	var addrs []netip.Addr
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	if a, err := netip.ParseAddr(host); err == nil {
		addrs = append(addrs, a.Unmap().WithZone(""))
	} else if own, err := os.Hostname(); name == "localhost" {
		addrs = append(addrs, netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback())
	} else if err == nil && name == strings.ToLower(own) {
		addrs = o.machine()
	}
	for _, a := range addrs {
		if a.IsUnspecified() { // connects to this machine
			a = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		}
		if a == listener || listener.IsUnspecified() && (a.IsLoopback() || o.isMachine(a)) {
			return true
		}
	}
	return false
}

func (o *OwnListeners) isMachine(a netip.Addr) bool {
	for _, own := range o.machine() {
		if own == a {
			return true
		}
	}
	return false
}

// machine returns the present addresses of this machine's interfaces.
func (o *OwnListeners) machine() (addrs []netip.Addr) {
	list := o.interfaces
	if list == nil {
		list = net.InterfaceAddrs
	}
	all, err := list()
	if err != nil {
		return nil
	}
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			addrs = append(addrs, p.Addr().Unmap().WithZone(""))
		}
	}
	return addrs
}
