package upstream

import "sluice/dataplane/ascii"

// hopByHop reports whether a header belongs to one connection only. That includes Content-Length,
// which the writer of the body writes.
func hopByHop[T string | []byte](name T) bool {
	switch len(name) {
	case 2:
		return ascii.EqualFold(name, "te")
	case 7:
		return ascii.EqualFold(name, "upgrade") || ascii.EqualFold(name, "trailer")
	case 10:
		return ascii.EqualFold(name, "connection") || ascii.EqualFold(name, "keep-alive")
	case 14:
		return ascii.EqualFold(name, "content-length")
	case 17:
		return ascii.EqualFold(name, "transfer-encoding")
	}
	return len(name) > 6 && ascii.EqualFold(name[:6], "proxy-")
}

const (
	tokenByte  = 1 << iota // RFC 9110 tchar
	valueByte              // a field value: visible, space, tab, obs-text
	targetByte             // a request target: visible ASCII
)

var byteClass = func() (t [256]uint8) {
	for b := 0x21; b <= 0xff; b++ {
		if b == 0x7f {
			continue
		}
		t[b] |= valueByte
		if b < 0x7f {
			t[b] |= targetByte
		}
	}
	t[' '] |= valueByte
	t['\t'] |= valueByte
	for _, b := range "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ" {
		t[b] |= tokenByte
	}
	return t
}()

func classMatches[T string | []byte](s T, class uint8) bool {
	for i := 0; i < len(s); i++ {
		if byteClass[s[i]]&class == 0 {
			return false
		}
	}
	return true
}

func validToken[T string | []byte](s T) bool { return len(s) > 0 && classMatches(s, tokenByte) }
func validValue[T string | []byte](s T) bool { return classMatches(s, valueByte) }
func validTarget(s string) bool              { return classMatches(s, targetByte) }

// trimSpace removes optional white space around a field value.
func trimSpace(b []byte) []byte {
	for len(b) > 0 && (b[0] == ' ' || b[0] == '\t') {
		b = b[1:]
	}
	for len(b) > 0 && (b[len(b)-1] == ' ' || b[len(b)-1] == '\t') {
		b = b[:len(b)-1]
	}
	return b
}
