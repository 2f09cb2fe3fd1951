package migration

import (
	"encoding/json"
	"testing"
)

// TestMatchesTokens checks that only texts that are one token per event are exact, in the alphabet
// of any vocabulary.
func TestMatchesTokens(t *testing.T) {
	for _, k := range []struct {
		name   string
		tokens []string
		pieces []string
		want   bool
	}{
		{"plain", []string{"Hel", "lo", " you"}, []string{"Hel", "lo", " you"}, true},
		{"bytes", []string{"Hello", "Ġthere", "Ċ", "Ã©"}, []string{"Hello", " there", "\n", "é"}, true},
		{"pieces", []string{"Hello", "▁there", "<0x0A>", "é"}, []string{"Hello", " there", "\n", "é"}, true},
		{"two in one event", []string{"Hello", "Ġthere"}, []string{"Hello there"}, false},
		{"cut otherwise", []string{"Hello", "Ġthere"}, []string{"Hell", "o there"}, false},
		{"more tokens", []string{"a", "b"}, []string{"a"}, false},
		{"fewer tokens", []string{"a"}, []string{"a", "b"}, false},
		{"another text", []string{"a", "b"}, []string{"a", "c"}, false},
		{"half a letter apart", []string{"Ã", "©"}, []string{"é"}, false},
	} {
		strs, _ := json.Marshal(k.tokens)
		pieces := make([][]byte, len(k.pieces))
		for i, p := range k.pieces {
			pieces[i] = []byte(p)
		}
		if got := matchesTokens(strs, pieces); got != k.want {
			t.Errorf("%s: %v", k.name, got)
		}
	}
	if len(unprintable) != 68 { // GPT-2's alphabet has 188 printable characters of Latin-1
		t.Errorf("%d bytes without a sign of their own", len(unprintable))
	}
}
