package index

import (
	"runtime"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"sluice/router/kvevents"
	"sluice/router/kvindex"
	"sluice/router/worker"
)

const (
	eventBlocks = 16 // blocks an event
	eventTokens = 16 // tokens a block
	eventChains = 256
	chainEvents = 4 // stores in a row, each the next's parent
)

// BenchmarkEventsApply decodes msgpack and stores into the index, all on one
// core: prompts of four events of 16 blocks of 16 tokens, each with its parent,
// a message an event. events/s is by the CPU time of the one goroutine.
func BenchmarkEventsApply(b *testing.B) {
	for _, form := range []string{"array", "map"} {
		b.Run("encoding="+form, func(b *testing.B) {
			messages := eventMessages(form == "map")
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			b.ReportAllocs()
			var took time.Duration
			events := 0
			for b.Loop() {
				b.StopTimer()
				rank := worker.New(worker.Spec{ID: "w"}).Ranks[0]
				ix := kvindex.New(kvindex.Options{})
				ix.(kvindex.Reserver).Reserve(rank.Slot, eventChains*chainEvents*eventBlocks)
				a := kvevents.NewApplier(ix, rank, "model", "vllm")
				runtime.GC()
				b.StartTimer()
				start := cpu()
				for _, m := range messages {
					if err := a.Apply(m); err != nil {
						b.Fatal(err)
					}
				}
				took += cpu() - start
				events += len(messages)
				if ix.Len() != eventChains*chainEvents*eventBlocks {
					b.Fatalf("%d blocks in the index", ix.Len())
				}
			}
			b.ReportMetric(float64(events)/took.Seconds(), "events/s")
			b.ReportMetric(float64(took.Nanoseconds())/float64(events), "ns/op")
		})
	}
}

// eventMessages writes vLLM's batches of one BlockStored each: arrays as to
// 0.23, or maps as from 0.24.
func eventMessages(asMap bool) (out [][]byte) {
	rng := uint64(42)
	draw := func() uint64 {
		rng ^= rng << 13
		rng ^= rng >> 7
		rng ^= rng << 17
		return rng
	}
	for range eventChains {
		var parent uint64
		for e := range chainEvents {
			hashes := make([]uint64, eventBlocks)
			for i := range hashes {
				hashes[i] = draw() | 1<<63 // as wide as an engine's
			}
			var m []byte
			field := func(name string) {
				if asMap {
					m = msgp.AppendString(m, name)
				}
			}
			m = msgp.AppendArrayHeader(m, 3)
			m = msgp.AppendFloat64(m, 1763690000.5)
			m = msgp.AppendArrayHeader(m, 1)
			if asMap {
				m = msgp.AppendMapHeader(m, 8)
			} else {
				m = msgp.AppendArrayHeader(m, 8)
			}
			field("type")
			m = msgp.AppendString(m, "BlockStored")
			field("block_hashes")
			m = msgp.AppendArrayHeader(m, eventBlocks)
			for _, h := range hashes {
				m = msgp.AppendUint64(m, h)
			}
			field("parent_block_hash")
			if e == 0 {
				m = msgp.AppendNil(m)
			} else {
				m = msgp.AppendUint64(m, parent)
			}
			field("token_ids")
			m = msgp.AppendArrayHeader(m, eventBlocks*eventTokens)
			for range eventBlocks * eventTokens {
				m = msgp.AppendUint32(m, uint32(draw()%128_000))
			}
			field("block_size")
			m = msgp.AppendInt(m, eventTokens)
			field("lora_id")
			m = msgp.AppendNil(m)
			field("medium")
			m = msgp.AppendString(m, "GPU")
			field("lora_name")
			m = msgp.AppendNil(m)
			m = msgp.AppendInt(m, 0)
			out = append(out, m)
			parent = hashes[eventBlocks-1]
		}
	}
	return out
}
