package harness

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
)

// Trials returns n, or 20*n if SLUICE_SOAK is set.
func Trials(n int) int {
	if os.Getenv("SLUICE_SOAK") != "" {
		return 20 * n
	}
	return n
}

// RandomPrompt returns the content of a JSON string of n bytes or a few more, with escapes.
func RandomPrompt(rng *rand.Rand, n int) string {
	var text strings.Builder
	for text.Len() < n {
		switch rng.IntN(5) {
		case 0:
			text.WriteString(`é\n\"stream\":true,\"max_tokens\":9 \u00e9 漢字 }] `)
		case 1:
			text.WriteString(strings.Repeat("again and again ", rng.IntN(1+n/40)))
		default:
			fmt.Fprintf(&text, "%x ", rng.Uint64())
		}
	}
	return text.String()
}
