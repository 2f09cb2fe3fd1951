// Package options has the options of a simulated engine and their flags.
package options

import (
	"cmp"
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

// Options describes an engine and its behaviour. The zero value is complete: an
// aggregated vLLM with one rank on a free loopback port. Speed scales the times of Cost;
// Lease, PullTimeout and RestartAfter are real time.
type Options struct {
	// Listen is the HTTP address; "" means "127.0.0.1:0". With RankPorts every rank also
	// has its own port: the ports after that of Listen, or free ones if Listen names none.
	Listen    string
	RankPorts bool
	Role      string // "prefill", "decode" or "aggregated" (""); a label only: vLLM serves every request in any role
	Engine    string // "vllm" (""), "sglang" or "trtllm"
	PD        string // P/D family, see Families; "" is the engine's own: "nixl" for vllm, else the engine's name
	Release   string // vLLM release whose handles, timeouts, errors, events and endpoints it has; "" means "0.32"
	Version   string // response of /version; "" is the release
	Model     string // "" means "sim"
	Ranks     int    // data-parallel ranks; 0 means 1

	// KVEvents is the PUB endpoint of rank 0; rank r uses port+r. "" uses free loopback
	// ports, "off" publishes nothing. Replay is the same for the ROUTER socket.
	KVEvents    string
	Replay      string
	Topic       string
	Encoding    string // see Encodings; "" means "vllm-map", for sglang "sglang-map"
	BytesHashes bool   // publish 32-byte digests (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0)
	Loads       string // SGLang: PUB endpoint of rank 0's load snapshots, as KVEvents; "" or "off" publishes none, "auto" uses free ports
	BufferSteps int    // batches available for replay; 0 means 10000

	BlockSize   int // tokens per KV block; 0 means 16
	Blocks      int // KV blocks per rank, one of them the null block; 0 means 8192
	MaxModelLen int // 0 means as much as fits in the cache, at most 262144
	MaxSeqs     int // running sequences per rank; 0 means 1024
	MaxBatch    int // tokens per step; 0 means 8192
	MaxQueue    int // waiting sequences per rank, beyond which a request gets 503; 0 means 65536
	// Scheduling is vLLM's --scheduling-policy: "fcfs" (""), which ignores a body's priority, or
	// "priority": lower values first, and for want of blocks the highest is preempted.
	Scheduling string

	Cost  cost.Model
	Speed float64 // time runs Speed times faster; 0 means 1, below 0 or +Inf no waiting at all
	Seed  uint64  // part of every output; instances that must agree need the same

	// Lease is how long the blocks of a prefill wait for decode; 0 is the release's value,
	// 30 s since 0.22. Since 0.22 a heartbeat (sent every sixth of the lease) extends it to
	// at least two thirds from then on.
	Lease      time.Duration
	Incomplete string // behaviour for a handle without block ids: "crash" (as vLLM 0.32, ""), "error" or "recompute"
	Expired    string // behaviour for a handle whose lease expired: "stale" (200 as vLLM 0.32, which reads freed blocks; counted, ""), "error" or "crash"
	// PullTimeout is how long a decode tries to reach a prefill that does not respond or
	// does not know the engine id; 0 means 30 s.
	PullTimeout  time.Duration
	AbortTimeout time.Duration // Mooncake and NIXL push: how long prefill offers blocks, and decode waits for the offer; 0 means 480 s

	// SidePort is the port of the side channel between simulated engines (LMCache's init
	// and alloc port); 0 uses a free one.
	SidePort int
	// SideZMQ is host:port of a ZeroMQ socket, a NIXL side channel in vLLM's format.
	// Connections to the side port that speak ZMTP are forwarded to it; "" closes them.
	SideZMQ string
	// Bootstrap is the address of a prefill's bootstrap server (SGLang, Mooncake); ""
	// uses a free loopback port.
	Bootstrap         string
	RegisterDelay     time.Duration // SGLang: from the start until the ranks are registered and /route returns them
	BootstrapTimeout  time.Duration // SGLang prefill: for decode's handshake; 0 means 300 s
	WaitingTimeout    time.Duration // SGLang decode: for the KV; 0 means 300 s
	HeartbeatInterval time.Duration // SGLang decode: after two missed heartbeats the prefill is dead; 0 means 5 s
	Balance           string        // SGLang prefill's ranks: "follow_bootstrap_room" ("") or "round_robin"
	Incremental       bool          // SGLang: native streams carry deltas (--incremental-streaming-output)
	SkipTokenizer     bool          // SGLang: native responses have no text (--skip-tokenizer-init)
	HeaderOverrides   bool          // SGLang: x-override-* headers (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES)

	LMCacheProxy string // LMCache prefill: destination of its notifications, tcp://host:port; "" sends none
	OldNotify    bool   // LMCache up to 0.3.6: the notifications are named NixlProxyNotif
	EarlyNotify  bool   // LMCache prefill: the notifications are sent before the response
	Store        string // shared storage: engines of this process with the same name share blocks

	RestartAfter time.Duration // the engine restarts this long after a crash; 0 means never. Not scaled by Speed.

	ClientIDs      bool // the request id is X-Request-Id alone (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1), as before 0.14
	Coalesce       bool // write all events of a step for one client as one chunk
	HideCached     bool // usage has no prompt_tokens_details (vLLM without --enable-prompt-tokens-details)
	NoPrefixCache  bool
	BodyLimit      int  // bytes of a request body; 0 means 64 MiB
	StreamBuffer   int  // bytes buffered for one slow reader before its connection is closed; 0 means 16 MiB
	Records        int  // requests stored for Requests(); 0 means 1024, below 0 none
	LogBlocks      bool // record when the last block of each request is released, for Kept; grows without bound
	Faults         []faults.Fault
	deprecated     []string // warnings about the parsed flags, see DeprecatedNames
	FaultSeed      uint64   // random seed of faults with a probability
	NoTokenize     bool     // /tokenize returns 404, as behind proxies that pass on the OpenAI API only
	ChatTemplate   string   // what GET /tokenizer_info reports; "": there is no such endpoint, as in vLLM without --enable-tokenizer-info-endpoint
	DisableScaleUp bool     // /inference/v1/* returns 403, as vLLM without --enable-scale-out

	VLLM vllm.Release // Release, parsed; WithDefaults sets it
}

// Flags binds every option to a flag of fs, with its default and help.
func (o *Options) Flags(fs *flag.FlagSet) {
	fs.StringVar(&o.Listen, "listen", "127.0.0.1:0", "HTTP `address`; port 0 uses a free one")
	fs.BoolVar(&o.RankPorts, "rank-ports", false, "open one more port for each data-parallel rank")
	fs.StringVar(&o.Role, "role", "aggregated", "prefill, decode or aggregated")
	fs.StringVar(&o.Engine, "engine", "vllm", "engine: "+strings.Join(Engines(), ", "))
	fs.StringVar(&o.PD, "pd", "", "P/D family: "+strings.Join(Families(), ", ")+"; empty is the engine's own")
	fs.StringVar(&o.Release, "release", "0.32", "vLLM `release` to simulate: handles, timeouts, errors, events, endpoints (0.9 to 0.33)")
	fs.StringVar(&o.Version, "engine-version", "", "response of /version; empty is the release")
	fs.StringVar(&o.Model, "model", "sim", "model `name`")
	fs.IntVar(&o.Ranks, "ranks", 1, "data-parallel ranks")
	fs.StringVar(&o.KVEvents, "kv-events", "", "PUB `endpoint` of rank 0 (tcp://host:port, rank r at port+r), or off; empty uses free loopback ports")
	fs.StringVar(&o.Replay, "kv-replay", "", "replay ROUTER `endpoint` of rank 0, or off; empty uses free loopback ports")
	fs.StringVar(&o.Loads, "kv-loads", "off", "SGLang: `endpoint` of rank 0's load snapshots, off, or auto for free loopback ports")
	fs.StringVar(&o.Topic, "kv-topic", "", "topic frame of KV events")
	fs.StringVar(&o.Encoding, "kv-encoding", "", "encoding of KV events: "+strings.Join(eventcodec.Encodings(), ", "))
	fs.BoolVar(&o.BytesHashes, "kv-bytes-hashes", false, "publish 32-byte block hashes instead of integers")
	fs.IntVar(&o.BufferSteps, "kv-buffer-steps", 10000, "event batches kept for replay")
	fs.StringVar(&o.LMCacheProxy, "lmcache-proxy", "", "`endpoint` to which LMCache sends notifications, tcp://host:port; empty sends none")
	fs.BoolVar(&o.OldNotify, "lmcache-old-notify", false, "name the notifications as LMCache up to 0.3.6 does")
	fs.BoolVar(&o.EarlyNotify, "lmcache-early-notify", false, "send the notifications before the response of prefill")
	fs.StringVar(&o.Store, "store", "", "shared storage: `name` of the store; engines of this process with one name share blocks")
	fs.IntVar(&o.BlockSize, "block-size", 16, "tokens per KV block")
	fs.IntVar(&o.Blocks, "blocks", 8192, "KV blocks per rank")
	fs.IntVar(&o.MaxModelLen, "max-model-len", 0, "longest prompt and output in tokens; 0 means as much as fits in the cache")
	fs.IntVar(&o.MaxSeqs, "max-num-seqs", 1024, "running sequences per rank")
	fs.IntVar(&o.MaxBatch, "max-num-batched-tokens", 8192, "tokens per step")
	fs.IntVar(&o.MaxQueue, "max-queue", 65536, "waiting sequences per rank, beyond which a request gets 503")
	fs.StringVar(&o.Scheduling, "scheduling-policy", "fcfs", "order of waiting requests: fcfs, or priority, by the body's priority (lower first)")
	o.Cost.AddFlags(fs)
	o.Speed = 1
	fs.Func("speed", "time runs faster by this `factor`; inf or 0 means no waiting (default 1)", func(s string) error {
		x, err := strconv.ParseFloat(s, 64)
		if err != nil || math.IsNaN(x) || x < 0 {
			return fmt.Errorf("want 0 or more, or inf")
		}
		if x == 0 {
			x = math.Inf(1)
		}
		o.Speed = x
		return nil
	})
	fs.Uint64Var(&o.Seed, "seed", 0, "seed of every output")
	fs.DurationVar(&o.Lease, "lease", 0, "how long the blocks of a prefill wait for decode; 0 is the release's value, 30 s since 0.22")
	fs.StringVar(&o.Incomplete, "incomplete-handle", "crash", "behaviour for a handle without block ids: crash (vLLM 0.32), error or recompute")
	fs.StringVar(&o.Expired, "expired-handle", "stale", "behaviour for a handle whose lease expired: stale (vLLM 0.32 reads freed blocks: 200, counted), error or crash")
	fs.DurationVar(&o.PullTimeout, "pull-timeout", 30*time.Second, "how long decode tries to reach a prefill")
	fs.DurationVar(&o.AbortTimeout, "abort-timeout", 480*time.Second, "Mooncake, NIXL push: how long prefill offers blocks and decode waits for them")
	fs.IntVar(&o.SidePort, "side-port", 0, "`port` of the side channel between simulated engines (LMCache's init and alloc port); 0 uses a free one")
	fs.StringVar(&o.Bootstrap, "bootstrap", "127.0.0.1:0", "`address` of a prefill's bootstrap server (SGLang, Mooncake)")
	fs.DurationVar(&o.RegisterDelay, "register-delay", 0, "SGLang: delay before the ranks of prefill are registered with the bootstrap server")
	fs.DurationVar(&o.BootstrapTimeout, "bootstrap-timeout", 300*time.Second, "SGLang: how long prefill waits for decode's handshake")
	fs.DurationVar(&o.WaitingTimeout, "waiting-timeout", 300*time.Second, "SGLang: how long decode waits for the KV")
	fs.DurationVar(&o.HeartbeatInterval, "heartbeat-interval", 5*time.Second, "SGLang: interval of decode's heartbeats to prefill")
	fs.StringVar(&o.Balance, "load-balance-method", "follow_bootstrap_room", "SGLang prefill: follow_bootstrap_room or round_robin")
	fs.BoolVar(&o.Incremental, "incremental-streaming-output", false, "SGLang: native streams carry deltas")
	fs.BoolVar(&o.SkipTokenizer, "skip-tokenizer-init", false, "SGLang: native responses have no text")
	fs.BoolVar(&o.HeaderOverrides, "header-overrides", false, "SGLang: obey x-override-* headers")
	fs.DurationVar(&o.RestartAfter, "restart-after", 0, "restart this long after a crash; 0 never restarts")
	fs.BoolVar(&o.Coalesce, "coalesce", false, "write all events of a step for one client as one chunk")
	fs.BoolVar(&o.HideCached, "hide-cached-tokens", false, "leave prompt_tokens_details out of usage")
	fs.BoolVar(&o.ClientIDs, "given-ids", false, "use X-Request-Id alone as the request id (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)")
	fs.BoolVar(&o.NoPrefixCache, "no-prefix-cache", false, "disable prefix caching")
	fs.IntVar(&o.BodyLimit, "body-limit", 64<<20, "bytes of a request body")
	fs.IntVar(&o.StreamBuffer, "stream-buffer", 16<<20, "bytes buffered for a slow reader before its connection is closed")
	fs.IntVar(&o.Records, "records", 1024, "requests stored for tests; -1 for none")
	fs.Uint64Var(&o.FaultSeed, "fault-seed", 0, "random seed of faults with a probability")
	fs.BoolVar(&o.NoTokenize, "no-tokenize", false, "return 404 for /tokenize")
	fs.StringVar(&o.ChatTemplate, "tokenizer-info", "", "chat `template` that GET /tokenizer_info reports; prompts are not rendered with it [no such endpoint]")
	fs.BoolVar(&o.DisableScaleUp, "no-scale-out", false, "return 403 for /inference/v1/*")
	fs.Func("fault", "inject a `fault`; may be repeated: kind=K[,path=P][,leg=L][,phase=body|role|answer][,id=X][,body=X][,n=N][,skip=N][,p=X][,status=S][,delay=D][,after=N]; kinds: "+strings.Join(faults.KindNames(), ", "), func(s string) error {
		f, err := faults.ParseFault(s)
		if err == nil {
			o.Faults = append(o.Faults, f)
			o.deprecated = append(o.deprecated, faults.DeprecatedNames(s)...)
		}
		return err
	})
}

// DeprecatedNames returns one warning for each deprecated name that the flags have.
func (o *Options) DeprecatedNames() []string {
	if o.Expired != oldExpired {
		return o.deprecated
	}
	return append(slices.Clone(o.deprecated), "--expired-handle "+oldExpired+" is now named stale; the old name is accepted in this release only")
}

// oldExpired is the deprecated name of Options.Expired's value stale.
const oldExpired = "garbage"

// families are the values of Options.PD: the P/D families that an engine can speak, and none.
var families = []string{"lmcache", "mooncake", "nixl", "nixl-push", "none", "orchestrated", "sglang", "storage", "trtllm"}

// Families returns the values of Options.PD.
func Families() []string { return slices.Clone(families) }

// Engines returns the values of Options.Engine.
func Engines() []string { return slices.Sorted(maps.Keys(enginePD)) }

// enginePD is the default P/D family of each engine.
var enginePD = map[string]string{"vllm": "nixl", "sglang": "sglang", "trtllm": "trtllm"}

// WithDefaults returns the options with their defaults, and an error that names an option that cannot be
// used.
func (o Options) WithDefaults() (Options, error) {
	setDefault(&o.Release, "0.32")
	var err error
	if o.VLLM, err = vllm.ParseRelease(o.Release); err != nil {
		return o, err
	}
	o.setDefaults()
	if err := o.checkNames(); err != nil {
		return o, err
	}
	if err := o.checkNumbers(); err != nil {
		return o, err
	}
	fits := (o.Blocks - 1) * o.BlockSize
	setDefault(&o.MaxModelLen, min(fits, 262144))
	if o.MaxModelLen < 2 || o.MaxModelLen > fits {
		return o, fmt.Errorf("sim: cannot use max-model-len %d: want 2 to %d, which is the capacity of %d blocks of %d tokens", o.MaxModelLen, fits, o.Blocks-1, o.BlockSize)
	}
	return o, nil
}

// setDefault sets *p to d if it is zero.
func setDefault[T comparable](p *T, d T) { *p = cmp.Or(*p, d) }

// setDefaults sets all options but Release and MaxModelLen. Some defaults depend on options that are
// set before them.
func (o *Options) setDefaults() {
	setDefault(&o.Listen, "127.0.0.1:0")
	setDefault(&o.Role, "aggregated")
	setDefault(&o.Engine, "vllm")
	setDefault(&o.PD, enginePD[o.Engine])
	setDefault(&o.Version, map[string]string{"sglang": "0.5.23"}[o.Engine])
	setDefault(&o.Version, o.VLLM.String())
	if o.Engine == "vllm" {
		setDefault(&o.Encoding, o.VLLM.Encoding())
	}
	setDefault(&o.Bootstrap, "127.0.0.1:0")
	setDefault(&o.Loads, "off")
	if o.KVEvents == "off" || o.Engine != "sglang" {
		o.Loads = "off"
	}
	setDefault(&o.Balance, "follow_bootstrap_room")
	// A decode server of SGLang has no prefix cache: its KV comes from prefill.
	o.NoPrefixCache = o.NoPrefixCache || o.PD == "sglang" && o.Role == "decode"
	setDefault(&o.Model, "sim")
	if o.Engine == "trtllm" { // its events are read over HTTP, which is not simulated
		o.KVEvents = "off"
		setDefault(&o.Encoding, "vllm-map")
	}
	setDefault(&o.Encoding, o.Engine+"-map")
	setDefault(&o.Scheduling, "fcfs")
	setDefault(&o.Incomplete, "crash")
	setDefault(&o.Expired, "stale")
	if o.Expired == oldExpired {
		o.Expired = "stale"
	}
	setDefault(&o.Ranks, 1)
	setDefault(&o.BufferSteps, 10000)
	setDefault(&o.BlockSize, 16)
	setDefault(&o.Blocks, 8192)
	setDefault(&o.MaxSeqs, 1024)
	setDefault(&o.MaxBatch, 8192)
	setDefault(&o.MaxQueue, 65536)
	setDefault(&o.BodyLimit, 64<<20)
	setDefault(&o.StreamBuffer, 16<<20)
	setDefault(&o.Records, 1024)
	setDefault(&o.Lease, o.VLLM.Lease())
	setDefault(&o.PullTimeout, 30*time.Second)
	setDefault(&o.AbortTimeout, 480*time.Second)
	setDefault(&o.BootstrapTimeout, 300*time.Second)
	setDefault(&o.WaitingTimeout, 300*time.Second)
	setDefault(&o.HeartbeatInterval, 5*time.Second)
	o.Cost = o.Cost.WithDefaults()
	setDefault(&o.Speed, 1)
	if o.Speed < 0 {
		o.Speed = math.Inf(1)
	}
}

// checkNames returns an error for an option whose value is not one of its names.
func (o *Options) checkNames() error {
	for _, c := range []struct {
		name, val string
		ok        []string
	}{
		{"role", o.Role, []string{"prefill", "decode", "aggregated"}},
		{"engine", o.Engine, Engines()},
		{"pd", o.PD, Families()},
		{"scheduling-policy", o.Scheduling, []string{"fcfs", "priority"}},
		{"load-balance-method", o.Balance, []string{"follow_bootstrap_room", "round_robin"}},
		{"incomplete-handle", o.Incomplete, []string{"crash", "error", "recompute"}},
		{"expired-handle", o.Expired, []string{"stale", "error", "crash"}},
		{"kv-encoding", o.Encoding, eventcodec.Encodings()},
	} {
		if !slices.Contains(c.ok, c.val) {
			return fmt.Errorf("sim: cannot use %s %q: want %s", c.name, c.val, strings.Join(c.ok, ", "))
		}
	}
	return nil
}

// checkNumbers returns an error for an option that is out of its range.
func (o *Options) checkNumbers() error {
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
			return fmt.Errorf("sim: cannot use %s %d: want %d to %d", c.name, c.val, c.min, c.max)
		}
	}
	return nil
}
