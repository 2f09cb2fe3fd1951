package config

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "update the golden files")

// Every file of testdata/bad has its errors beside it, to be read in review;
// go test -run Golden -rewrite updates them.
func TestGoldenErrors(t *testing.T) {
	files, err := filepath.Glob("testdata/bad/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatal("no files", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			_, err = Parse(filepath.Base(file), text)
			if err == nil {
				t.Fatal("no error")
			}
			var all Errors
			if !errors.As(err, &all) {
				t.Fatalf("a %T", err)
			}
			for _, e := range all {
				if e.Line < 1 || e.Col < 1 {
					t.Errorf("no place: %v", e)
				}
			}
			for _, secret := range []string{"do-not-show-me", "secret"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("the error tells a secret: %v", err)
				}
			}
			golden := strings.TrimSuffix(file, ".yaml") + ".err"
			got := err.Error() + "\n"
			if *rewrite {
				if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}
