package wire

import (
	"context"
	"encoding/binary"
	"testing"
	"time"
)

// TestTrySend: what is offered comes with the flush that was due, in order with what is
// sent, and nothing is taken beyond the credit.
func TestTrySend(t *testing.T) {
	for _, kind := range sockets {
		refused := make(chan int, 1)
		_, dial, _ := serve(t, kind, Options{Handler: handlerFunc(func(s *Stream) {
			item := make([]byte, 100)
			no := 0
			for i := uint32(0); i < 500; {
				due := false
				for ; i < 500; i++ {
					binary.BigEndian.PutUint32(item, i)
					taken, first, err := s.TrySend(item)
					if err != nil || first && due {
						t.Errorf("%s: item %d: due %v twice, %v", kind, i, first, err)
						return
					}
					due = due || first
					if !taken {
						no++
						break
					}
				}
				if due {
					s.Flush()
				}
				if i < 500 {
					if err := s.Send(item); err != nil { // waits for credit
						t.Error(err)
						return
					}
					i++
				}
			}
			refused <- no
			s.End(nil)
			if taken, due, err := s.TrySend(item); taken || due || err == nil {
				t.Errorf("%s: offered behind the end: %v, %v, %v", kind, taken, due, err)
			}
		})})
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		c := dial(DialOptions{Window: 2000})
		s, err := c.Open([]byte("x"))
		if err != nil {
			t.Fatal(err)
		}
		for i := uint32(0); i < 500; i++ {
			p, ok, err := s.Recv(ctx)
			if !ok || len(p) != 100 || binary.BigEndian.Uint32(p) != i {
				t.Fatalf("%s: item %d: %x, %v, %v", kind, i, p, ok, err)
			}
		}
		if _, ok, err := s.Recv(ctx); ok || err != nil {
			t.Errorf("%s: behind the last: %v, %v", kind, ok, err)
		}
		if n := <-refused; n == 0 {
			t.Errorf("%s: 50,000 bytes were taken without a wait, for a credit of 2000", kind)
		}
	}
}
