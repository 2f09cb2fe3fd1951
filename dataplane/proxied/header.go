package proxied

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"
)

const (
	// MaxHeader bounds a whole header. Version 1 has at most 107 bytes; of version 2's
	// 64 KiB a proxy uses a few hundred, a kilobyte or two with a certificate's name.
	MaxHeader = 4 << 10

	maxLine = 107 // of version 1, its CRLF included
	fixed   = 16  // of version 2: signature, command, family, length
)

var (
	lineStart = []byte("PROXY ")
	signature = []byte("\r\n\r\n\x00\r\nQUIT\n")
)

var (
	// ErrShort is given of bytes that may become a header when more have come.
	ErrShort = errors.New("proxied: the header is not whole")
	// ErrNone is given of bytes that are no header's beginning.
	ErrNone = errors.New("proxied: there is no PROXY header")
)

// Header is what a PROXY header says.
type Header struct {
	// Client is where the connection came from, as the proxy saw it. It is invalid
	// where the proxy speaks for itself (LOCAL: a health check), does not know
	// (UNKNOWN, UNSPEC), or was called over a Unix socket.
	Client netip.AddrPort
	Size   int // of the header, in bytes
}

// Parse reads the header that b begins with. Besides ErrShort and ErrNone it fails
// with what is wrong in a header; the connection cannot be used then.
func Parse(b []byte) (Header, error) {
	switch {
	case begins(b, signature):
		if len(b) < fixed {
			return Header{}, ErrShort
		}
		return parseBinary(b)
	case begins(b, lineStart):
		return parseLine(b)
	}
	return Header{}, ErrNone
}

// begins says whether b begins with mark, as far as it has come.
func begins(b, mark []byte) bool {
	n := min(len(b), len(mark))
	return bytes.Equal(b[:n], mark[:n])
}

// parseLine reads version 1: PROXY TCP4 SOURCE DESTINATION PORT PORT CRLF.
func parseLine(b []byte) (Header, error) {
	end := bytes.Index(b[:min(len(b), maxLine)], []byte("\r\n"))
	switch {
	case end < 0 && len(b) < maxLine:
		return Header{}, ErrShort
	case end < 0:
		return Header{}, fmt.Errorf("proxied: a PROXY line of version 1 has no end within %d bytes", maxLine)
	}
	h := Header{Size: end + 2}
	if end < len(lineStart) {
		return h, errors.New("proxied: an empty PROXY line")
	}
	rest := b[len(lineStart):end]
	family, rest, _ := bytes.Cut(rest, space)
	if string(family) == "UNKNOWN" {
		return h, nil // whatever stands behind it
	}
	if string(family) != "TCP4" && string(family) != "TCP6" {
		return h, fmt.Errorf("proxied: a PROXY line of family %q; want TCP4, TCP6 or UNKNOWN", clip(family))
	}
	var words [4][]byte
	for i := range words {
		var more bool
		words[i], rest, more = bytes.Cut(rest, space)
		if more != (i < len(words)-1) {
			return h, fmt.Errorf("proxied: a PROXY line %q; want PROXY %s SOURCE DESTINATION PORT PORT", clip(b[:end]), family)
		}
	}
	client, err := address(words[0], family[3] == '4')
	if err == nil {
		_, err = address(words[1], family[3] == '4')
	}
	if err != nil {
		return h, fmt.Errorf("proxied: a PROXY line %q: %w", clip(b[:end]), err)
	}
	port, ok := portOf(words[2])
	if _, also := portOf(words[3]); !ok || !also {
		return h, fmt.Errorf("proxied: a PROXY line %q: want ports from 0 to 65535", clip(b[:end]))
	}
	h.Client = netip.AddrPortFrom(client, port)
	return h, nil
}

var space = []byte{' '}

func address(b []byte, four bool) (netip.Addr, error) {
	ip, err := netip.ParseAddr(unsafe.String(unsafe.SliceData(b), len(b)))
	if err != nil || ip.Is4() != four || ip.Zone() != "" {
		want := "IPv6"
		if four {
			want = "IPv4"
		}
		return netip.Addr{}, fmt.Errorf("%q is no %s address", clip(b), want)
	}
	return ip.Unmap(), nil
}

func portOf(b []byte) (uint16, bool) {
	if len(b) == 0 || len(b) > 5 || len(b) > 1 && b[0] == '0' {
		return 0, false
	}
	n := 0
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int(c-'0')
	}
	return uint16(n), n <= 65535
}

// The families of version 2 with a stream's addresses, and what these take.
const (
	overTCP4, sizeTCP4 = 0x11, 12
	overTCP6, sizeTCP6 = 0x21, 36
	overUnix, sizeUnix = 0x31, 216
)

// parseBinary reads version 2. What stands behind the addresses (TLVs: the name asked
// for, the cloud's endpoint, a checksum) is passed over.
func parseBinary(b []byte) (Header, error) {
	command, family := b[12], b[13]
	size := fixed + int(binary.BigEndian.Uint16(b[14:]))
	h := Header{Size: size}
	switch {
	case command>>4 != 2:
		return h, fmt.Errorf("proxied: a PROXY header of version %d; want 1 or 2", command>>4)
	case command&15 > 1:
		return h, fmt.Errorf("proxied: a PROXY header with command %d; want 0 (LOCAL) or 1 (PROXY)", command&15)
	case size > MaxHeader:
		return h, fmt.Errorf("proxied: a PROXY header of %d bytes; want at most %d", size, MaxHeader)
	}
	least := 0
	if command&15 == 1 {
		switch family {
		case 0x00:
		case overTCP4:
			least = sizeTCP4
		case overTCP6:
			least = sizeTCP6
		case overUnix:
			least = sizeUnix
		default:
			return h, fmt.Errorf("proxied: a PROXY header of family 0x%02x; want TCP over IPv4 (0x11), over IPv6 (0x21), a Unix stream (0x31) or none (0x00)", family)
		}
	}
	if size < fixed+least {
		return h, fmt.Errorf("proxied: a PROXY header of family 0x%02x with %d bytes behind its length; want %d or more", family, size-fixed, least)
	}
	if len(b) < size {
		return Header{}, ErrShort
	}
	switch b := b[fixed:]; least {
	case sizeTCP4:
		h.Client = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b)), binary.BigEndian.Uint16(b[8:]))
	case sizeTCP6:
		h.Client = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), binary.BigEndian.Uint16(b[32:]))
	}
	return h, nil
}

// clip keeps what a stranger sent short in a message.
func clip(b []byte) []byte { return b[:min(len(b), maxLine)] }
