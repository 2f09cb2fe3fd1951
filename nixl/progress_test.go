package nixl

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"sluice/bench/testwait"
)

// Agents with a progress thread of NIXL's, as an engine's is, and without one, as ours
// are, read and write each other's memory and notify each other, however that goes: also
// where an agent that is at rest must copy the bytes itself (TCP has no one-sided writes),
// and where what comes shows at no descriptor (shared memory).
func TestRealMixedProgress(t *testing.T) {
	realNIXL(t)
	for tls, parameters := range map[string]map[string]string{
		"":        nil,
		"TLS=tcp": {"engine_config": "TLS=tcp"},
		"TLS=sm":  {"engine_config": "TLS=sm,self", "ucx_error_handling_mode": "none"},
	} {
		for _, threads := range [][2]bool{{false, false}, {true, false}, {false, true}} {
			t.Run(fmt.Sprint("threads ", threads, " ", tls), func(t *testing.T) {
				w := realNetwork()
				var boxes [2]inbox
				var agents [2]*Agent
				var memory [2]*Memory
				const size = 4 << 20
				for i := range agents {
					agents[i] = w.open(t, Config{Progress: threads[i], Parameters: parameters, OnNotification: boxes[i].handler()})
					memory[i] = hostMemory(t, agents[i], size)
				}
				for i := range agents {
					a, b, mine, theirs := agents[i], agents[1-i], memory[i], memory[1-i]
					p := connectAgents(t, a, b)
					sent := make([]byte, size)
					for k := range sent {
						sent[k] = byte(rand.Uint32())
					}
					move := func(how Op, note []byte) time.Duration {
						began := time.Now()
						tr := must[*Transfer](t)(a.Start(t.Context(), how, []Span{{mine, 0, size}}, p, []Remote{theirs.Remote(0, size)}, note))
						if _, err := tr.Wait(t.Context()); err != nil {
							t.Fatal(err)
						}
						return time.Since(began)
					}
					copy(mine.Bytes(), sent)
					wrote := move(Write, []byte("written"))
					testwait.Until(t, "the note of the write", func() bool { return len(boxes[1-i].list()) == 1 })
					if !bytes.Equal(theirs.Bytes(), sent) {
						t.Fatal("other bytes were written")
					}
					clear(mine.Bytes())
					read := move(Read, nil)
					if !bytes.Equal(mine.Bytes(), sent) {
						t.Fatal("other bytes were read")
					}
					if err := a.Notify(t.Context(), p, []byte("bare")); err != nil {
						t.Fatal(err)
					}
					testwait.Until(t, "a bare notification", func() bool { return len(boxes[1-i].list()) == 2 })
					t.Logf("%d bytes written in %s, read in %s", size, wrote.Round(time.Microsecond), read.Round(time.Microsecond))
				}
			})
		}
	}
}
