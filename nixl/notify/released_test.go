//go:build cgo

package notify

import (
	"bufio"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// TestReleasedSenders is run by scripts/fixtures/lmcache.sh: the notification of
// each release, encoded by its own class and sent by the library it sends with.
func TestReleasedSenders(t *testing.T) {
	python, script := os.Getenv("LMCACHE_PYTHON"), os.Getenv("LMCACHE_SCRIPT")
	if python == "" {
		t.Skip("scripts/fixtures/lmcache.sh runs this")
	}
	for _, version := range []string{"0.3.3", "0.3.5", "0.3.7", "0.4.4", "0.4.7", "0.5.6"} {
		t.Run(version, func(t *testing.T) {
			b := listen(t, Options{})
			cmd := exec.Command(python, script, "push", version, b.Endpoint())
			cmd.Stderr = os.Stderr
			in, err := cmd.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer cmd.Wait()
			if !bufio.NewScanner(out).Scan() {
				t.Fatal("the sender does not begin")
			}
			fmt.Fprintln(in, "before") // nobody waits for it yet
			for i := range 100 {
				id := fmt.Sprintf("req-%d", i)
				k := expect(t, b, id, 2)
				fmt.Fprintf(in, "%s\n%s\n", id, id)
				if err := k.Wait(within(20 * time.Second)); err != nil {
					t.Fatal(err)
				}
				k.Close()
			}
			if err := expect(t, b, "before", 1).Wait(within(time.Second)); err != nil {
				t.Error(err)
			}
			in.Close()
			if st := b.Stats(); st.Received != 201 || st.Malformed+st.Foreign != 0 {
				t.Errorf("%+v", st)
			}
		})
	}
}
