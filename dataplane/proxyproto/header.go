package proxyproto

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"unsafe"
)

const (
	// MaxHeader is the largest accepted header in bytes. Version 1 has at most 107 bytes.
	// Version 2 allows 64 KiB, of which proxies use a few hundred bytes, or one to two KiB
	// with the name of a certificate.
	MaxHeader = 4 << 10

	maxV1Line    = 107 // of version 1, its CRLF included
	v2HeaderSize = 16  // of version 2: signature, command, family, length
)

var (
	v1Prefix    = []byte("PROXY ")
	v2Signature = []byte("\r\n\r\n\x00\r\nQUIT\n")
)

var (
	// ErrIncomplete is the error of Parse for the beginning of a header.
	ErrIncomplete = errors.New("proxyproto: the PROXY header is incomplete")
	// ErrNoHeader is the error of Parse for bytes that do not begin a header.
	ErrNoHeader = errors.New("proxyproto: there is no PROXY header")
)

// Header is the content of a PROXY header.
type Header struct {
	// Client is the source of the connection as the proxy saw it. It is invalid if the
	// proxy made the connection itself (LOCAL: a health check), does not know the source
	// (UNKNOWN, UNSPEC), or was reached over a Unix socket.
	Client netip.AddrPort
	Size   int // of the header, in bytes
}

// Parse parses the header at the beginning of b. It fails with ErrIncomplete, ErrNoHeader, or
// an error that describes a malformed header; then the connection cannot be used.
func Parse(b []byte) (Header, error) {
	switch {
	case hasPrefixSoFar(b, v2Signature):
		if len(b) < v2HeaderSize {
			return Header{}, ErrIncomplete
		}
		return parseV2(b)
	case hasPrefixSoFar(b, v1Prefix):
		return parseV1(b)
	}
	return Header{}, ErrNoHeader
}

// hasPrefixSoFar reports whether b begins with mark or with a part of it.
func hasPrefixSoFar(b, mark []byte) bool {
	n := min(len(b), len(mark))
	return bytes.Equal(b[:n], mark[:n])
}

// parseV1 parses version 1: PROXY TCP4 SOURCE DESTINATION PORT PORT CRLF.
func parseV1(b []byte) (Header, error) {
	end := bytes.Index(b[:min(len(b), maxV1Line)], []byte("\r\n"))
	switch {
	case end < 0 && len(b) < maxV1Line:
		return Header{}, ErrIncomplete
	case end < 0:
		return Header{}, fmt.Errorf("proxyproto: a PROXY line of version 1 has no end within %d bytes", maxV1Line)
	}
	h := Header{Size: end + 2}
	if end < len(v1Prefix) {
		return h, errors.New("proxyproto: an empty PROXY line")
	}
	rest := b[len(v1Prefix):end]
	family, rest, _ := bytes.Cut(rest, space)
	if string(family) == "UNKNOWN" {
		return h, nil // the rest of the line has no meaning
	}
	if string(family) != "TCP4" && string(family) != "TCP6" {
		return h, fmt.Errorf("proxyproto: a PROXY line of family %q; want TCP4, TCP6 or UNKNOWN", truncateForLog(family))
	}
	var words [4][]byte
	for i := range words {
		var more bool
		words[i], rest, more = bytes.Cut(rest, space)
		if more != (i < len(words)-1) {
			return h, fmt.Errorf("proxyproto: a PROXY line %q; want PROXY %s SOURCE DESTINATION PORT PORT", truncateForLog(b[:end]), family)
		}
	}
	client, err := address(words[0], family[3] == '4')
	if err == nil {
		_, err = address(words[1], family[3] == '4')
	}
	if err != nil {
		return h, fmt.Errorf("proxyproto: a PROXY line %q: %w", truncateForLog(b[:end]), err)
	}
	port, ok := portOf(words[2])
	if _, also := portOf(words[3]); !ok || !also {
		return h, fmt.Errorf("proxyproto: a PROXY line %q: want ports from 0 to 65535", truncateForLog(b[:end]))
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
		return netip.Addr{}, fmt.Errorf("%q is no %s address", truncateForLog(b), want)
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

// The stream families of version 2, and the sizes of their addresses in bytes.
const (
	v2TCP4, v2TCP4Size = 0x11, 12
	v2TCP6, v2TCP6Size = 0x21, 36
	v2Unix, v2UnixSize = 0x31, 216
)

// parseV2 parses version 2. It skips the TLVs behind the addresses (server name, cloud
// endpoint, checksum).
func parseV2(b []byte) (Header, error) {
	command, family := b[12], b[13]
	size := v2HeaderSize + int(binary.BigEndian.Uint16(b[14:]))
	h := Header{Size: size}
	switch {
	case command>>4 != 2:
		return h, fmt.Errorf("proxyproto: a PROXY header of version %d; want 1 or 2", command>>4)
	case command&15 > 1:
		return h, fmt.Errorf("proxyproto: a PROXY header with command %d; want 0 (LOCAL) or 1 (PROXY)", command&15)
	case size > MaxHeader:
		return h, fmt.Errorf("proxyproto: a PROXY header of %d bytes; want at most %d", size, MaxHeader)
	}
	minSize := 0
	if command&15 == 1 {
		switch family {
		case 0x00:
		case v2TCP4:
			minSize = v2TCP4Size
		case v2TCP6:
			minSize = v2TCP6Size
		case v2Unix:
			minSize = v2UnixSize
		default:
			return h, fmt.Errorf("proxyproto: a PROXY header of family 0x%02x; want TCP over IPv4 (0x11), over IPv6 (0x21), a Unix stream (0x31) or none (0x00)", family)
		}
	}
	if size < v2HeaderSize+minSize {
		return h, fmt.Errorf("proxyproto: a PROXY header of family 0x%02x with %d bytes of addresses; want at least %d", family, size-v2HeaderSize, minSize)
	}
	if len(b) < size {
		return Header{}, ErrIncomplete
	}
	switch b := b[v2HeaderSize:]; minSize {
	case v2TCP4Size:
		h.Client = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b)), binary.BigEndian.Uint16(b[8:]))
	case v2TCP6Size:
		h.Client = netip.AddrPortFrom(netip.AddrFrom16([16]byte(b)).Unmap(), binary.BigEndian.Uint16(b[32:]))
	}
	return h, nil
}

// truncateForLog bounds untrusted bytes in an error message.
func truncateForLog(b []byte) []byte { return b[:min(len(b), maxV1Line)] }
