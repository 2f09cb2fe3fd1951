package harness

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// SoakTime says whether the long tests run their length, and for how long one does that
// is as long as is wished: full, or what SLUICE_SOAK says (SLUICE_SOAK=15m).
func SoakTime(full time.Duration) (span time.Duration, long bool) {
	text := os.Getenv("SLUICE_SOAK")
	if span, err := time.ParseDuration(text); err == nil && span > 0 {
		return span, true
	}
	return full, text != ""
}

// LogFigure prints what a test has measured of one of RELIABILITY.md's points, for
// scripts/reliability.py to gather.
func LogFigure(t testing.TB, point int, format string, args ...any) {
	t.Helper()
	t.Logf("reliability %d: %s", point, fmt.Sprintf(format, args...))
}
