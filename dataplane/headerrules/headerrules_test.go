package headerrules

import (
	"maps"
	"os"
	"strings"
	"testing"
)

// The documented table of headers is the one in the code.
func TestHeaderTableIsDocumented(t *testing.T) {
	text, err := os.ReadFile("../../docs/access.md")
	if err != nil {
		t.Fatal(err)
	}
	doc := strings.ToLower(string(text))
	all := maps.Clone(RequestTable)
	maps.Copy(all, ResponseTable)
	for name := range all {
		if !strings.Contains(doc, "`"+name+"`") {
			t.Errorf("docs/access.md does not name `%s`", name)
		}
		if len(name) > maxName {
			t.Errorf("maxName is less than the length of %s", name)
		}
	}
}

func BenchmarkOfRequest(b *testing.B) {
	names := [][]byte{[]byte("Host"), []byte("User-Agent"), []byte("Accept"), []byte("Content-Type"), []byte("Content-Length"), []byte("Authorization"), []byte("X-Stainless-Package-Version"), []byte("X-Stainless-Lang"), []byte("Accept-Encoding"), []byte("Connection")}
	for b.Loop() {
		for _, n := range names {
			OfRequest(n)
		}
	}
}
