package front

import (
	"regexp"
	"testing"
)

// Python's uuid.UUID accepts the router's own ids, which some engines require.
func TestRequestIDsAreUUIDs(t *testing.T) {
	var ids requestIDs
	ids.init()
	for _, before := range []uint64{0, 1, 1 << 20, 1<<32 - 1, 1<<47 - 1} {
		ids.counter.Store(before)
		if id := ids.next(); !regexp.MustCompile("^[0-9a-f]{32}$").MatchString(id) {
			t.Errorf("%q is not 32 hexadecimal digits", id)
		}
	}
}
