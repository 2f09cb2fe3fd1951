package proxyproto

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// v2 makes a header of version 2.
func v2(command, family byte, body []byte) []byte {
	b := append([]byte{}, v2Signature...)
	b = append(b, 0x20|command, family)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	return append(b, body...)
}

var (
	four    = append([]byte{192, 0, 2, 1, 198, 51, 100, 2}, 0x30, 0x39, 0x01, 0xbb)
	six     = append(append(netip.MustParseAddr("2001:db8::1").AsSlice(), netip.MustParseAddr("2001:db8::2").AsSlice()...), 0x30, 0x39, 0x01, 0xbb)
	mapped  = append(append(netip.MustParseAddr("::ffff:192.0.2.1").AsSlice(), netip.MustParseAddr("2001:db8::2").AsSlice()...), 0x30, 0x39, 0x01, 0xbb)
	tlvs    = []byte{0x02, 0, 3, 'a', '.', 'b', 0x04, 0, 1, 0} // authority, no-op
	unknown = "PROXY UNKNOWN\r\n"
)

func TestHeaders(t *testing.T) {
	for _, c := range []struct{ name, text, client string }{
		{"v1 of IPv4", "PROXY TCP4 192.0.2.1 198.51.100.2 12345 443\r\n", "192.0.2.1:12345"},
		{"v1 of IPv6", "PROXY TCP6 2001:db8::1 2001:db8::2 12345 443\r\n", "[2001:db8::1]:12345"},
		{"v1, longest", "PROXY TCP6 ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff1 ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff 65535 65535\r\n", "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff1]:65535"},
		{"v1 unknown", unknown, ""},
		{"v1 unknown with more", "PROXY UNKNOWN ffff::1 what ever\r\n", ""},
		{"v2 of IPv4", string(v2(1, 0x11, four)), "192.0.2.1:12345"},
		{"v2 of IPv6", string(v2(1, 0x21, six)), "[2001:db8::1]:12345"},
		{"v2 of IPv4 in IPv6", string(v2(1, 0x21, mapped)), "192.0.2.1:12345"},
		{"v2 with TLVs", string(v2(1, 0x11, append(append([]byte{}, four...), tlvs...))), "192.0.2.1:12345"},
		{"v2 of a Unix socket", string(v2(1, 0x31, make([]byte, 216))), ""},
		{"v2 without a family", string(v2(1, 0x00, nil)), ""},
		{"v2 without a family, with TLVs", string(v2(1, 0x00, tlvs)), ""},
		{"v2 LOCAL", string(v2(0, 0x00, nil)), ""},
		{"v2 LOCAL with addresses", string(v2(0, 0x11, four)), ""},
		{"v2 LOCAL of an odd family", string(v2(0, 0xff, []byte{1})), ""},
		{"v2, largest", string(v2(1, 0x11, append(append([]byte{}, four...), make([]byte, MaxHeader-v2HeaderSize-12)...))), "192.0.2.1:12345"},
	} {
		behind := "GET / HTTP/1.1\r\n"
		h, err := Parse([]byte(c.text + behind))
		if err != nil || h.Size != len(c.text) {
			t.Errorf("%s: %+v, %v; want %d bytes", c.name, h, err, len(c.text))
			continue
		}
		if got := h.Client; got.IsValid() != (c.client != "") || got.IsValid() && got.String() != c.client {
			t.Errorf("%s: client %v, want %q", c.name, got, c.client)
		}
		for n := range len(c.text) {
			if _, err := Parse([]byte(c.text[:n])); !errors.Is(err, ErrIncomplete) {
				t.Fatalf("%s: of its first %d bytes: %v, want ErrShort", c.name, n, err)
			}
		}
	}
}

func TestBadHeaders(t *testing.T) {
	line := func(rest string) string { return "PROXY " + rest + "\r\n" }
	for _, c := range []struct{ text, says string }{
		{"GET / HTTP/1.1\r\n", "no PROXY header"},
		{"PROXX", "no PROXY header"},
		{"\r\n\r\nGET", "no PROXY header"},
		{"\x16\x03\x01", "no PROXY header"},
		{line("TCP4 192.0.2.1 198.51.100.2 12345"), "want PROXY TCP4 SOURCE"},
		{line("TCP4 192.0.2.1 198.51.100.2 12345 443 "), "want PROXY TCP4 SOURCE"},
		{line("TCP4  192.0.2.1 198.51.100.2 12345 443"), "want PROXY TCP4 SOURCE"},
		{line("TCP4 2001:db8::1 198.51.100.2 12345 443"), "no IPv4 address"},
		{line("TCP4 192.0.2.1 2001:db8::1 12345 443"), "no IPv4 address"},
		{line("TCP6 192.0.2.1 198.51.100.2 12345 443"), "no IPv6 address"},
		{line("TCP6 fe80::1%lo 2001:db8::1 1 1"), "no IPv6 address"},
		{line("TCP4 192.0.2.01 198.51.100.2 12345 443"), "no IPv4 address"},
		{line("TCP4 192.0.2.1 198.51.100.2 65536 443"), "want ports"},
		{line("TCP4 192.0.2.1 198.51.100.2 012 443"), "want ports"},
		{line("TCP4 192.0.2.1 198.51.100.2 +1 443"), "want ports"},
		{line("TCP4 192.0.2.1 198.51.100.2 1 "), "want ports"},
		{line("UDP4 192.0.2.1 198.51.100.2 1 1"), "TCP4, TCP6 or UNKNOWN"},
		{line(""), "TCP4, TCP6 or UNKNOWN"},
		{"PROXY UNKNOWN" + strings.Repeat(" x", 60), "no end within 107"},
		{string(v2(2, 0x11, four)), "command 2"},
		{strings.Replace(string(v2(1, 0x11, four)), "\x21\x11", "\x31\x11", 1), "version 3"},
		{string(v2(1, 0x12, four)), "family 0x12"},
		{string(v2(1, 0x41, four)), "family 0x41"},
		{string(v2(1, 0x11, four[:11])), "want at least 12"},
		{string(v2(1, 0x21, four)), "want at least 36"},
		{string(v2(1, 0x31, six)), "want at least 216"},
		{string(v2(1, 0x11, make([]byte, MaxHeader))), "want at most 4096"},
		{string(v2(0, 0x00, make([]byte, 60_000))), "want at most 4096"},
	} {
		if h, err := Parse([]byte(c.text)); err == nil || !strings.Contains(err.Error(), c.says) || h.Client.IsValid() {
			t.Errorf("%q: %+v, %v; want %q", truncateForLog([]byte(c.text)), h, err, c.says)
		}
	}
}

func TestHeadersAllocateNothing(t *testing.T) {
	line, binary := []byte("PROXY TCP4 192.0.2.1 198.51.100.2 12345 443\r\n"), v2(1, 0x21, six)
	if n := testing.AllocsPerRun(100, func() {
		_, _ = Parse(line)
		_, _ = Parse(binary)
	}); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzHeader(f *testing.F) {
	for _, s := range []string{"PROXY TCP4 192.0.2.1 198.51.100.2 12345 443\r\n", unknown, "PROXY TCP6 ::1 ::1 1 1\r\nGET / HTTP/1.1\r\n", "GET / HTTP/1.1\r\n", "\r\n\r\n",
		string(v2(1, 0x11, four)), string(v2(1, 0x21, six)), string(v2(0, 0, tlvs)), string(v2(1, 0x31, make([]byte, 216)))} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		h, err := Parse(b)
		if err != nil {
			if h.Client.IsValid() {
				t.Fatalf("a client %v with %v", h.Client, err)
			}
			return
		}
		if h.Size < 8 || h.Size > len(b) || h.Size > MaxHeader {
			t.Fatalf("%d bytes of %d", h.Size, len(b))
		}
		// The parser ignores bytes after the header, and no part of a header is a whole one.
		if again, err := Parse(append(b[:h.Size:h.Size], "\r\nGET"...)); err != nil || again != h {
			t.Fatalf("%+v, %v; before %+v", again, err, h)
		}
		if _, err := Parse(b[:h.Size-1]); !errors.Is(err, ErrIncomplete) {
			t.Fatalf("without its last byte: %v", err)
		}
		if c := h.Client; c.IsValid() && (c.Addr().Zone() != "" || c.Addr().Is4In6()) {
			t.Fatalf("client %v", c)
		}
	})
}
