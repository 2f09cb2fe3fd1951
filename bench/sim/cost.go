package sim

import (
	"flag"
	"math"
	"time"
)

// Cost is the linear time model of one rank. A step (one pass of the batch) takes
//
//	Step + PerSeq × decoding sequences + PerContext × their tokens in cache + PerPrefill × prompt tokens of this step
//
// so prefill slows the decodes it shares a step with, as on a GPU. The defaults
// are about an 8B model on one recent GPU. A negative field means none of it.
type Cost struct {
	Admit      time.Duration // between the request's last byte and the engine knowing it (HTTP, template, tokenizer); 0 means 1 ms
	Step       time.Duration // every step; 0 means 8 ms
	PerSeq     time.Duration // 0 means 40 µs
	PerContext time.Duration // per token; 0 means none
	PerPrefill time.Duration // per token; 0 means 40 µs
	BytesToken int           // KV bytes of one token; 0 means 128 KiB
	Bandwidth  float64       // bytes per second of a KV transfer; 0 means 10 GB/s
	Transfer   time.Duration // fixed part of a transfer; 0 means 3 ms
	Handshake  time.Duration // first transfer between two engines; 0 means 200 ms
}

func (c *Cost) flags(fs *flag.FlagSet) {
	fs.DurationVar(&c.Admit, "cost-admit", time.Millisecond, "time before the engine knows a request")
	fs.DurationVar(&c.Step, "cost-step", 8*time.Millisecond, "time of an empty step")
	fs.DurationVar(&c.PerSeq, "cost-seq", 40*time.Microsecond, "step time added by a decoding sequence")
	fs.DurationVar(&c.PerContext, "cost-context", 0, "step time added by a token in cache of a decoding sequence")
	fs.DurationVar(&c.PerPrefill, "cost-prefill", 40*time.Microsecond, "step time added by a prompt token computed")
	fs.IntVar(&c.BytesToken, "cost-bytes-per-token", 128<<10, "KV bytes of a token")
	fs.Float64Var(&c.Bandwidth, "cost-bandwidth", 10e9, "bytes per second of a KV transfer")
	fs.DurationVar(&c.Transfer, "cost-transfer", 3*time.Millisecond, "fixed time of a KV transfer")
	fs.DurationVar(&c.Handshake, "cost-handshake", 200*time.Millisecond, "time of the first transfer between two engines")
}

func (c Cost) withDefaults() Cost {
	dur := func(p *time.Duration, d time.Duration) {
		if *p == 0 {
			*p = d
		}
		*p = max(*p, 0)
	}
	dur(&c.Admit, time.Millisecond)
	dur(&c.Step, 8*time.Millisecond)
	dur(&c.PerSeq, 40*time.Microsecond)
	dur(&c.PerContext, 0)
	dur(&c.PerPrefill, 40*time.Microsecond)
	dur(&c.Transfer, 3*time.Millisecond)
	dur(&c.Handshake, 200*time.Millisecond)
	if c.BytesToken == 0 {
		c.BytesToken = 128 << 10
	}
	if c.Bandwidth <= 0 {
		c.Bandwidth = 10e9
	}
	return c
}

// step is the time of a step that computes prefill prompt tokens beside decodes
// sequences that hold context tokens together.
func (c *Cost) step(prefill, decodes, context int) time.Duration {
	return c.Step + time.Duration(decodes)*c.PerSeq + time.Duration(context)*c.PerContext + time.Duration(prefill)*c.PerPrefill
}

// transfer is the time to move the KV of n tokens.
func (c *Cost) transfer(n int) time.Duration {
	return c.Transfer + time.Duration(float64(n)*float64(c.BytesToken)/c.Bandwidth*1e9)
}

// scaled is simulated time d in real time.
func scaled(d time.Duration, speed float64) time.Duration {
	if math.IsInf(speed, 1) {
		return 0
	}
	return time.Duration(float64(d) / speed)
}
