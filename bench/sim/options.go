package sim

import (
	"flag"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/eventcodec"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/vllm"
)

// Options says what an engine is and how it behaves. The zero value is a whole
// engine: an aggregated vLLM with one rank on a free loopback port. Speed scales
// the times of Cost; Lease, PullTimeout and RestartAfter are real time.
type Options struct {
	// Listen is the HTTP address; "" means "127.0.0.1:0". RankPorts gives every
	// rank its own port too (the next ports up when Listen names a port, free
	// ones when not).
	Listen    string
	RankPorts bool
	Role      string // "prefill", "decode" or "aggregated" (""); it only labels: vLLM serves every request on any role
	Engine    string // "vllm" (""), "sglang" or "trtllm"
	PD        string // hand-over family, see PDFamilies; "" is the engine's own: "nixl" of vllm, else the engine's name
	Release   string // of vLLM: handles, time-outs, error shapes, event encoding and endpoints are its; "" means "0.32"
	Version   string // what /version says; "" is the release's
	Model     string // "" means "sim"
	Ranks     int    // data-parallel ranks, 0 means 1

	// KVEvents is the PUB endpoint of rank 0, rank r is at port+r: "" takes free
	// loopback ports, "off" publishes nothing. Replay is the same for the ROUTER.
	KVEvents    string
	Replay      string
	Topic       string
	Encoding    string // see Encodings; "" means "vllm-map", for sglang "sglang-map"
	BytesHashes bool   // publish whole 32-byte digests (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)
	Loads       string // SGLang: PUB endpoint of rank 0's load snapshots, as KVEvents; "" or "off" publishes none, "auto" takes free ports
	BufferSteps int    // batches kept for replay, 0 means 10000

	BlockSize   int // tokens per KV block, 0 means 16
	Blocks      int // KV blocks per rank, one of them the null block; 0 means 8192
	MaxModelLen int // 0 means what fits in the cache, at most 262144
	MaxSeqs     int // running sequences per rank, 0 means 1024
	MaxBatch    int // tokens per step, 0 means 8192
	MaxQueue    int // waiting sequences per rank beyond which a request gets 503; 0 means 65536

	Cost  cost.Model
	Speed float64 // time runs Speed times faster; 0 means 1, below 0 or +Inf no waiting at all
	Seed  uint64  // mixed into every output; instances that must agree need the same

	// Lease is how long a prefill's blocks wait for decode; 0 is the release's, 30 s
	// since 0.22. Since then a
	// heartbeat (sent every sixth of it) extends it to at least two thirds from then.
	Lease      time.Duration
	Incomplete string // a handle without block ids: "crash" (as vLLM 0.32, ""), "error" or "recompute"
	Expired    string // a handle whose lease ran out: "garbage" (200 as 0.32, counted, ""), "error" or "crash"
	// PullTimeout is how long a decode tries to reach a prefill that does not
	// answer, or that does not know the engine id; 0 means 30 s.
	PullTimeout  time.Duration
	AbortTimeout time.Duration // Mooncake and NIXL push: how long prefill offers blocks, and decode waits for the offer; 0 means 480 s

	// SidePort is the port of the side channel, where simulated engines reach each
	// other (LMCache's init and alloc port); 0 takes a free one.
	SidePort int
	// SideZMQ is host:port of a ZeroMQ socket, a NIXL side channel of vLLM's form:
	// connections to the side port that speak ZMTP are passed on to it; "" closes them.
	SideZMQ string
	// Bootstrap is the address of a prefill's bootstrap server (SGLang, Mooncake);
	// "" takes a free port on the loopback.
	Bootstrap         string
	RegisterDelay     time.Duration // SGLang: after the start until the ranks are registered and /route tells
	BootstrapTimeout  time.Duration // SGLang prefill: for decode's handshake; 0 means 300 s
	WaitingTimeout    time.Duration // SGLang decode: for the KV; 0 means 300 s
	HeartbeatInterval time.Duration // SGLang decode: two missed ones and the prefill is dead; 0 means 5 s
	Balance           string        // SGLang prefill's ranks: "follow_bootstrap_room" ("") or "round_robin"
	Incremental       bool          // SGLang: native streams hold deltas (--incremental-streaming-output)
	SkipTokenizer     bool          // SGLang: native answers have no text (--skip-tokenizer-init)
	HeaderOverrides   bool          // SGLang: x-override-* headers (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES)

	LMCacheProxy string // LMCache prefill: where its notifications go, tcp://host:port; "" sends none
	OldNotify    bool   // LMCache up to 0.3.6: they are called NixlProxyNotif
	EarlyNotify  bool   // LMCache prefill: they go out before its answer
	Store        string // shared storage: engines of this process with the same one share blocks

	RestartAfter time.Duration // after a crash the engine comes back; 0 means never. Not scaled by Speed.

	ClientIDs      bool // requests go by X-Request-Id alone (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1), as before 0.14
	Coalesce       bool // write all events of a step that go to one client as one chunk
	HideCached     bool // usage carries no prompt_tokens_details (vLLM without --enable-prompt-tokens-details)
	NoPrefixCache  bool
	BodyLimit      int  // bytes of a request body, 0 means 64 MiB
	StreamBuffer   int  // bytes kept for one slow reader before it is cut, 0 means 16 MiB
	Records        int  // requests kept for Requests(), 0 means 1024, below 0 none
	LogBlocks      bool // remember when each request's last block was let go, for Kept; grows without bound
	Faults         []faults.Fault
	FaultSeed      uint64 // decides faults with a probability
	DisableScaleUp bool   // /inference/v1/* answers 403, as vLLM without --enable-scale-out

	release vllm.Release // Release, read
}

// Flags binds every option to a flag of fs, with its default and help.
func (o *Options) Flags(fs *flag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", "127.0.0.1:0", "HTTP `address`; port 0 takes a free one")
	fs.BoolVar(&o.RankPorts, "rank-ports", false, "one more port for each data-parallel rank")
	fs.StringVar(&o.Role, "role", "aggregated", "prefill, decode or aggregated")
	fs.StringVar(&o.Engine, "engine", "vllm", strings.Join(slices.Sorted(maps.Keys(surfaces)), ", "))
	fs.StringVar(&o.PD, "pd", "", "prefill/decode hand-over: "+strings.Join(PDFamilies(), ", ")+"; empty is the engine's own")
	fs.StringVar(&o.Release, "release", "0.32", "vLLM `release` to behave as: handles, time-outs, errors, events, endpoints (0.9 to 0.33)")
	fs.StringVar(&o.Version, "engine-version", "", "what /version says; empty is the release's")
	fs.StringVar(&o.Model, "model", "sim", "model `name`")
	fs.IntVar(&o.Ranks, "ranks", 1, "data-parallel ranks")
	fs.StringVar(&o.KVEvents, "kv-events", "", "PUB `endpoint` of rank 0 (tcp://host:port, rank r at port+r), or off; empty takes free loopback ports")
	fs.StringVar(&o.Replay, "kv-replay", "", "replay ROUTER `endpoint` of rank 0, or off; empty takes free loopback ports")
	fs.StringVar(&o.Loads, "kv-loads", "off", "SGLang: `endpoint` of rank 0's load snapshots, off, or auto for free loopback ports")
	fs.StringVar(&o.Topic, "kv-topic", "", "topic frame of KV events")
	fs.StringVar(&o.Encoding, "kv-encoding", "", "encoding of KV events: "+strings.Join(eventcodec.Encodings(), ", "))
	fs.BoolVar(&o.BytesHashes, "kv-bytes-hashes", false, "publish 32-byte block hashes instead of integers")
	fs.IntVar(&o.BufferSteps, "kv-buffer-steps", 10000, "event batches kept for replay")
	fs.StringVar(&o.LMCacheProxy, "lmcache-proxy", "", "where LMCache's notifications go, an `endpoint` as tcp://host:port; empty sends none")
	fs.BoolVar(&o.OldNotify, "lmcache-old-notify", false, "name the notifications as LMCache up to 0.3.6")
	fs.BoolVar(&o.EarlyNotify, "lmcache-early-notify", false, "send the notifications before prefill's answer")
	fs.StringVar(&o.Store, "store", "", "shared storage: `name` of the store, in this process")
	fs.IntVar(&o.BlockSize, "block-size", 16, "tokens per KV block")
	fs.IntVar(&o.Blocks, "blocks", 8192, "KV blocks per rank")
	fs.IntVar(&o.MaxModelLen, "max-model-len", 0, "longest prompt and output in tokens; 0 means what fits")
	fs.IntVar(&o.MaxSeqs, "max-num-seqs", 1024, "running sequences per rank")
	fs.IntVar(&o.MaxBatch, "max-num-batched-tokens", 8192, "tokens of one step")
	fs.IntVar(&o.MaxQueue, "max-queue", 65536, "waiting sequences per rank before 503")
	o.Cost.AddFlags(fs)
	o.Speed = 1
	fs.Func("speed", "time runs this `factor` faster; inf or 0 means no waiting (default 1)", func(s string) error {
		x, err := strconv.ParseFloat(s, 64)
		if err != nil || math.IsNaN(x) || x < 0 {
			return fmt.Errorf("want a number from 0 up, or inf")
		}
		if x == 0 {
			x = math.Inf(1)
		}
		o.Speed = x
		return nil
	})
	fs.Uint64Var(&o.Seed, "seed", 0, "mixed into every output")
	fs.DurationVar(&o.Lease, "lease", 0, "how long prefill's blocks wait for decode; 0 is the release's, 30 s since 0.22")
	fs.StringVar(&o.Incomplete, "incomplete-handle", "crash", "a handle without block ids: crash (vLLM 0.32), error or recompute")
	fs.StringVar(&o.Expired, "expired-handle", "garbage", "a handle whose lease ran out: garbage (vLLM 0.32: 200, counted), error or crash")
	fs.DurationVar(&o.PullTimeout, "pull-timeout", 30*time.Second, "how long decode tries an unreachable prefill")
	fs.DurationVar(&o.AbortTimeout, "abort-timeout", 480*time.Second, "Mooncake, NIXL push: how long blocks are offered and waited for")
	fs.IntVar(&o.SidePort, "side-port", 0, "`port` where simulated engines reach each other (LMCache's init and alloc port); 0 takes a free one")
	fs.StringVar(&o.Bootstrap, "bootstrap", "127.0.0.1:0", "`address` of a prefill's bootstrap server (SGLang, Mooncake)")
	fs.DurationVar(&o.RegisterDelay, "register-delay", 0, "SGLang: until prefill's ranks are registered with the bootstrap server")
	fs.DurationVar(&o.BootstrapTimeout, "bootstrap-timeout", 300*time.Second, "SGLang: how long prefill waits for decode's handshake")
	fs.DurationVar(&o.WaitingTimeout, "waiting-timeout", 300*time.Second, "SGLang: how long decode waits for the KV")
	fs.DurationVar(&o.HeartbeatInterval, "heartbeat-interval", 5*time.Second, "SGLang: between decode's looks for a prefill that does not answer")
	fs.StringVar(&o.Balance, "load-balance-method", "follow_bootstrap_room", "SGLang prefill: follow_bootstrap_room or round_robin")
	fs.BoolVar(&o.Incremental, "incremental-streaming-output", false, "SGLang: native streams hold deltas")
	fs.BoolVar(&o.SkipTokenizer, "skip-tokenizer-init", false, "SGLang: native answers have no text")
	fs.BoolVar(&o.HeaderOverrides, "header-overrides", false, "SGLang: obey x-override-* headers")
	fs.DurationVar(&o.RestartAfter, "restart-after", 0, "come back this long after a crash; 0 stays dead")
	fs.BoolVar(&o.Coalesce, "coalesce", false, "one chunk for all events of a step to one client")
	fs.BoolVar(&o.HideCached, "hide-cached-tokens", false, "no prompt_tokens_details in usage")
	fs.BoolVar(&o.ClientIDs, "given-ids", false, "know requests by X-Request-Id alone (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)")
	fs.BoolVar(&o.NoPrefixCache, "no-prefix-cache", false, "switch prefix caching off")
	fs.IntVar(&o.BodyLimit, "body-limit", 64<<20, "bytes of a request body")
	fs.IntVar(&o.StreamBuffer, "stream-buffer", 16<<20, "bytes kept for a slow reader before it is cut")
	fs.IntVar(&o.Records, "records", 1024, "requests remembered for tests; -1 for none")
	fs.Uint64Var(&o.FaultSeed, "fault-seed", 0, "decides the faults that have a probability")
	fs.BoolVar(&o.DisableScaleUp, "no-scale-out", false, "/inference/v1/* answers 403")
	fs.Func("fault", "inject a `fault`, may be given often: kind=K[,path=P][,leg=L][,phase=body|role|answer][,id=X][,body=X][,n=N][,skip=N][,p=X][,status=S][,delay=D][,after=N]; kinds: "+strings.Join(faults.KindNames(), ", "), func(s string) error {
		f, err := faults.ParseFault(s)
		if err == nil {
			o.Faults = append(o.Faults, f)
		}
		return err
	})
}

// enginePD is the hand-over of an engine that is not told another.
var enginePD = map[string]string{"vllm": "nixl", "sglang": "sglang", "trtllm": "trtllm"}

// withDefaults fills what is not said and refuses what cannot be.
func (o Options) withDefaults() (Options, error) {
	str := func(p *string, d string) {
		if *p == "" {
			*p = d
		}
	}
	num := func(p *int, d int) {
		if *p == 0 {
			*p = d
		}
	}
	dur := func(p *time.Duration, d time.Duration) {
		if *p == 0 {
			*p = d
		}
	}
	str(&o.Listen, "127.0.0.1:0")
	str(&o.Role, "aggregated")
	str(&o.Engine, "vllm")
	str(&o.PD, enginePD[o.Engine])
	str(&o.Version, map[string]string{"sglang": "0.5.23"}[o.Engine])
	str(&o.Release, "0.32")
	var err error
	if o.release, err = vllm.ParseRelease(o.Release); err != nil {
		return o, err
	}
	str(&o.Version, o.release.String())
	if o.Engine == "vllm" {
		str(&o.Encoding, o.release.Encoding())
	}
	str(&o.Bootstrap, "127.0.0.1:0")
	str(&o.Loads, "off")
	if o.KVEvents == "off" || o.Engine != "sglang" {
		o.Loads = "off"
	}
	str(&o.Balance, "follow_bootstrap_room")
	// A decode server of SGLang keeps no prefix cache: its KV comes from prefill.
	o.NoPrefixCache = o.NoPrefixCache || o.PD == "sglang" && o.Role == "decode"
	str(&o.Model, "sim")
	if o.Engine == "trtllm" { // its events are read over HTTP, which is not there
		o.KVEvents = "off"
		str(&o.Encoding, "vllm-map")
	}
	str(&o.Encoding, o.Engine+"-map")
	str(&o.Incomplete, "crash")
	str(&o.Expired, "garbage")
	num(&o.Ranks, 1)
	num(&o.BufferSteps, 10000)
	num(&o.BlockSize, 16)
	num(&o.Blocks, 8192)
	num(&o.MaxSeqs, 1024)
	num(&o.MaxBatch, 8192)
	num(&o.MaxQueue, 65536)
	num(&o.BodyLimit, 64<<20)
	num(&o.StreamBuffer, 16<<20)
	num(&o.Records, 1024)
	dur(&o.Lease, o.release.Lease())
	dur(&o.PullTimeout, 30*time.Second)
	dur(&o.AbortTimeout, 480*time.Second)
	dur(&o.BootstrapTimeout, 300*time.Second)
	dur(&o.WaitingTimeout, 300*time.Second)
	dur(&o.HeartbeatInterval, 5*time.Second)
	o.Cost = o.Cost.WithDefaults()
	if o.Speed == 0 {
		o.Speed = 1
	}
	if o.Speed < 0 {
		o.Speed = math.Inf(1)
	}
	for _, c := range []struct {
		name, val string
		ok        []string
	}{
		{"role", o.Role, []string{"prefill", "decode", "aggregated"}},
		{"engine", o.Engine, slices.Sorted(maps.Keys(surfaces))},
		{"pd", o.PD, PDFamilies()},
		{"load-balance-method", o.Balance, []string{"follow_bootstrap_room", "round_robin"}},
		{"incomplete-handle", o.Incomplete, []string{"crash", "error", "recompute"}},
		{"expired-handle", o.Expired, []string{"garbage", "error", "crash"}},
		{"kv-encoding", o.Encoding, eventcodec.Encodings()},
	} {
		if !slices.Contains(c.ok, c.val) {
			return o, fmt.Errorf("sim: cannot use %s %q: want %s", c.name, c.val, strings.Join(c.ok, ", "))
		}
	}
	for _, c := range []struct {
		name     string
		val      int
		min, max int
	}{
		{"ranks", o.Ranks, 1, 1024},
		{"block-size", o.BlockSize, 1, 4096},
		{"blocks", o.Blocks, 2, 1 << 24},
		{"max-num-seqs", o.MaxSeqs, 1, 1 << 20},
		{"max-num-batched-tokens", o.MaxBatch, 1, 1 << 24},
		{"side-port", o.SidePort, 0, 65535},
		{"kv-buffer-steps", o.BufferSteps, 1, 1 << 20},
	} {
		if c.val < c.min || c.val > c.max {
			return o, fmt.Errorf("sim: cannot use %s %d: want %d to %d", c.name, c.val, c.min, c.max)
		}
	}
	fits := (o.Blocks - 1) * o.BlockSize
	if o.MaxModelLen == 0 {
		o.MaxModelLen = min(fits, 262144)
	}
	if o.MaxModelLen < 2 || o.MaxModelLen > fits {
		return o, fmt.Errorf("sim: cannot use max-model-len %d: want 2 to %d, what %d blocks of %d hold", o.MaxModelLen, fits, o.Blocks-1, o.BlockSize)
	}
	return o, nil
}
