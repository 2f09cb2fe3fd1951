// Package ascii compares the names and tokens of HTTP, which are ASCII.
//
// bytes.EqualFold and strings.EqualFold also fold letters outside of ASCII: they take the Kelvin
// sign for a k and the long s for an s. A coding such as "chunKed" with that sign would be chunked
// here and unknown to the next server.
package ascii

// EqualFold reports whether a and b are equal if the case of ASCII letters is ignored. It does not
// allocate.
func EqualFold[A, B string | []byte](a A, b B) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range len(a) {
		x, y := a[i], b[i]
		if x != y && (x|0x20 != y|0x20 || x|0x20 < 'a' || x|0x20 > 'z') {
			return false
		}
	}
	return true
}
