package cost

import (
	"flag"
	"math"
	"time"
)

// Model is the linear time model of one rank. A step (one iteration of the batch) takes
//
//	Step + PerSeq × decoding sequences + PerContext × their tokens in cache + PerPrefill × prompt tokens of this step
//
// so prefill slows the decodes that share its step, as on a GPU. The defaults are
// about an 8B model on one recent GPU. A negative field means zero.
type Model struct {
	Admit      time.Duration // from the request's last byte until the engine schedules it (HTTP, template, tokenizer); 0 means 1 ms
	Step       time.Duration // every step; 0 means 8 ms
	PerSeq     time.Duration // 0 means 40 µs
	PerContext time.Duration // per token; 0 means none
	PerPrefill time.Duration // per token; 0 means 40 µs
	BytesToken int           // KV bytes of one token; 0 means 128 KiB
	Bandwidth  float64       // bytes per second of a KV transfer; 0 means 10 GB/s
	Transfer   time.Duration // fixed part of a transfer; 0 means 3 ms
	Handshake  time.Duration // first transfer between two engines; 0 means 200 ms
}

// AddFlags defines the flags --cost-*.
func (c *Model) AddFlags(fs *flag.FlagSet) {
	fs.DurationVar(&c.Admit, "cost-admit", time.Millisecond, "time before the engine schedules a request")
	fs.DurationVar(&c.Step, "cost-step", 8*time.Millisecond, "time of an empty step")
	fs.DurationVar(&c.PerSeq, "cost-seq", 40*time.Microsecond, "step time added by a decoding sequence")
	fs.DurationVar(&c.PerContext, "cost-context", 0, "step time added by a cached token of a decoding sequence")
	fs.DurationVar(&c.PerPrefill, "cost-prefill", 40*time.Microsecond, "step time added by a computed prompt token")
	fs.IntVar(&c.BytesToken, "cost-bytes-per-token", 128<<10, "KV bytes of a token")
	fs.Float64Var(&c.Bandwidth, "cost-bandwidth", 10e9, "bytes per second of a KV transfer")
	fs.DurationVar(&c.Transfer, "cost-transfer", 3*time.Millisecond, "fixed time of a KV transfer")
	fs.DurationVar(&c.Handshake, "cost-handshake", 200*time.Millisecond, "time of the first transfer between two engines")
}

// WithDefaults returns the model with its zero fields replaced by the defaults and its
// negative ones by zero.
func (c Model) WithDefaults() Model {
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

// StepTime returns the time of a step that computes prefill prompt tokens and one
// token for each of decodes sequences, which have context tokens in cache together.
func (c *Model) StepTime(prefill, decodes, context int) time.Duration {
	return c.Step + time.Duration(decodes)*c.PerSeq + time.Duration(context)*c.PerContext + time.Duration(prefill)*c.PerPrefill
}

// TransferTime returns the time to transfer the KV of n tokens.
func (c *Model) TransferTime(n int) time.Duration {
	return c.Transfer + time.Duration(float64(n)*float64(c.BytesToken)/c.Bandwidth*1e9)
}

// Scale converts simulated time to real time; an infinite speed takes none.
func Scale(d time.Duration, speed float64) time.Duration {
	if math.IsInf(speed, 1) {
		return 0
	}
	return time.Duration(float64(d) / speed)
}
