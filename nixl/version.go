package nixl

import (
	"fmt"
	"strconv"
	"strings"
)

// mismatch returns why agents of two NIXL versions must not communicate, or "" if no
// reason is known. The wheels' UCX changed its address format between 1.21 (NIXL up to
// 1.3) and 1.22 (NIXL from 1.4). Measured with 1.5.1 and 1.3.2 on one host: the newer
// one loads the older one's metadata, and its first message crashes the older process.
// A router that crashes engines is worse than none, so nothing is sent across that
// change.
func mismatch(ours, theirs string) string {
	a, okA := minor(ours)
	b, okB := minor(theirs)
	if !okA || !okB || (a < versionGap) == (b < versionGap) {
		return ""
	}
	return fmt.Sprintf("this router has NIXL %s, the peer %s: UCX changed between 1.3 and 1.4, and a message would crash the older process; use the engine's own wheel",
		strings.TrimPrefix(ours, "NIXL "), strings.TrimPrefix(theirs, "NIXL "))
}

// versionGap is the first version beyond the change: 1.4.
const versionGap = 1<<16 | 4

// minor returns major and minor of "1.3.2" or "NIXL 1.3.2" in one number.
func minor(v string) (int, bool) {
	f := strings.SplitN(strings.TrimPrefix(v, "NIXL "), ".", 3)
	if len(f) < 2 {
		return 0, false
	}
	major, err := strconv.ParseUint(f[0], 10, 15)
	if err != nil {
		return 0, false
	}
	m, err := strconv.ParseUint(f[1], 10, 15)
	return int(major)<<16 | int(m), err == nil
}
