package wire

import (
	"context"
	"fmt"
	"testing"
)

// BenchmarkItems sends items of 64 bytes through real sockets. The client is in
// the same process: ns/op and its share of allocations count both ends.
func BenchmarkItems(b *testing.B) {
	for _, kind := range sockets {
		for _, streams := range []int{1, 64} {
			b.Run(fmt.Sprintf("%s/%d", kind, streams), func(b *testing.B) {
				_, dial, _ := serve(b, kind, Options{Handler: handlerFunc(countedItem)})
				c := dial(DialOptions{Window: 64 << 10})
				per := b.N/streams + 1
				b.ReportAllocs()
				b.ResetTimer()
				done := make(chan error, streams)
				for range streams {
					s, err := c.Open(itemRequest(per, 64))
					if err != nil {
						b.Fatal(err)
					}
					go func() {
						for {
							_, ok, err := s.Recv(context.Background())
							if !ok {
								done <- err
								return
							}
						}
					}()
				}
				for range streams {
					if err := <-done; err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
