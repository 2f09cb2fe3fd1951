package harness

import (
	"fmt"
	"os"
	"testing"
	"time"
)

// SoakTime reports whether long tests run at full length, and how long a test of adjustable
// length runs: full, or the duration in SLUICE_SOAK (SLUICE_SOAK=15m).
func SoakTime(full time.Duration) (span time.Duration, long bool) {
	text := os.Getenv("SLUICE_SOAK")
	if span, err := time.ParseDuration(text); err == nil && span > 0 {
		return span, true
	}
	return full, text != ""
}

// LogFigure logs a figure measured for one of RELIABILITY.md's points. scripts/reliability.py
// reads these lines from the output of the test.
func LogFigure(t testing.TB, point int, format string, args ...any) {
	t.Helper()
	t.Logf("reliability %d: %s", point, fmt.Sprintf(format, args...))
}
