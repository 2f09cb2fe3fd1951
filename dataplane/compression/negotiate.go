package compression

import (
	"bytes"

	"sluice/dataplane/ascii"
)

// Algorithm is a content coding.
type Algorithm uint8

// The codings, in increasing order of preference at equal weight.
const (
	Identity Algorithm = iota
	Gzip
	Zstd
)

// Known lists the codings that Parse accepts, in the form of an Accept-Encoding value.
const Known = "gzip, zstd"

var names = [...]string{Identity: "identity", Gzip: "gzip", Zstd: "zstd"}

// String returns the name of the content coding, as in Content-Encoding.
func (c Algorithm) String() string { return names[c] }

// Parse parses the value of Content-Encoding; an empty value is Identity. It returns false for
// an unknown coding and for several codings, which no client of this API sends and each of
// which may be a decompression bomb.
func Parse(contentEncoding []byte) (Algorithm, bool) {
	v := bytes.Trim(contentEncoding, " \t")
	if len(v) == 0 {
		return Identity, true
	}
	return byName(v)
}

func byName(v []byte) (Algorithm, bool) {
	for c, name := range names {
		if ascii.EqualFold(v, name) {
			return Algorithm(c), true
		}
	}
	if ascii.EqualFold(v, "x-gzip") { // RFC 9110, 8.4.1.3
		return Gzip, true
	}
	return Identity, false
}

// Negotiate returns the coding with the highest weight in an Accept-Encoding value, Identity
// if the value is empty or malformed. At equal weight zstd comes before gzip and gzip before
// identity.
func Negotiate(acceptEncoding []byte) Algorithm {
	if len(acceptEncoding) == 0 {
		return Identity
	}
	const unnamed = -1
	weights := [len(names)]int{unnamed, unnamed, unnamed}
	rest := unnamed // the weight of "*"
	for len(acceptEncoding) > 0 {
		var item []byte
		item, acceptEncoding, _ = bytes.Cut(acceptEncoding, []byte{','})
		name, params, _ := bytes.Cut(item, []byte{';'})
		weight, ok := qualityOf(params)
		if !ok {
			return Identity
		}
		name = bytes.Trim(name, " \t")
		if c, known := byName(name); known {
			weights[c] = weight
		} else if len(name) == 1 && name[0] == '*' {
			rest = weight
		}
	}
	for c := range weights {
		if weights[c] == unnamed {
			weights[c] = max(rest, 0)
		}
	}
	best := Identity
	for _, c := range [...]Algorithm{Gzip, Zstd} {
		if weights[c] > 0 && weights[c] >= weights[best] {
			best = c
		}
	}
	return best
}

// qualityOf parses the weight in params ("q=0.5", RFC 9110, 12.4.2) in thousandths; 1000
// without one.
func qualityOf(params []byte) (int, bool) {
	v := bytes.Trim(params, " \t")
	if len(v) == 0 {
		return 1000, true
	}
	if len(v) < 3 || len(v) > 7 || v[0]|0x20 != 'q' || v[1] != '=' || v[2] > '1' || v[2] < '0' {
		return 0, false
	}
	weight := int(v[2]-'0') * 1000
	if len(v) > 3 && v[3] != '.' {
		return 0, false
	}
	unit := 100
	for _, d := range v[min(len(v), 4):] {
		if d < '0' || d > '9' {
			return 0, false
		}
		weight, unit = weight+int(d-'0')*unit, unit/10
	}
	return weight, weight <= 1000
}
