package config

import (
	"time"

	"sluice/router/worker"
)

// Config is the whole configuration after defaults. Values come from, each over
// the one before: the defaults, the file (Load), the environment (ApplyEnv), the
// flags (Flags.Apply). Workers add up instead: one named by environment or flag
// replaces the one of the same id and otherwise joins the file's.
//
// Field tags are the names in the file; environment names are SLUICE_ + the
// upper-cased path joined by "_" (SLUICE_TIMEOUTS_PREFILL=300s). The tags min,
// max, oneof, unit and off are the check of one field; what concerns several
// fields stands in check.go. Printing a Config hides its secrets.
type Config struct {
	Listen string `yaml:"listen"` // [127.0.0.1:8080]
	Admin  Admin  `yaml:"admin"`
	Log    Log    `yaml:"log"`

	Workers []Worker         `yaml:"workers"`
	PD      PD               `yaml:"pd"`
	Models  map[string]Model `yaml:"models"` // per-model overrides, by name

	Limits   Limits   `yaml:"limits"`
	Timeouts Timeouts `yaml:"timeouts"`
	Health   Health   `yaml:"health"`
	Tokens   Tokens   `yaml:"tokens"`
	Index    Index    `yaml:"index"`
	Schedule Schedule `yaml:"schedule"`

	// StripForbidden cuts client-sent kv_transfer_params & co. out of a body
	// instead of refusing the request [false].
	StripForbidden bool `yaml:"strip_forbidden"`

	// origins says where each value that is no default was given, by its path,
	// for the errors of checks made later.
	origins map[string]origin
}

// Admin is the admin listener.
type Admin struct {
	Listen string `yaml:"listen"`              // [127.0.0.1:9901]; loopback only; "off"
	Token  string `yaml:"token" secret:"true"` // [$SLUICE_ADMIN_TOKEN, else random]; never logged
	// RuntimeFile is where serve writes address and token, mode 0600
	// [$XDG_RUNTIME_DIR or the temporary folder, sluice-UID/ADDR.json].
	RuntimeFile string `yaml:"runtime_file"`
}

// Log is logging to standard error.
type Log struct {
	Level  string `yaml:"level" oneof:"debug info warn error"` // debug, info, warn, error [info]
	Format string `yaml:"format" oneof:"text json"`            // text, json [text]
}

// Worker is one entry of workers, or of --engine/--prefill/--decode.
type Worker struct {
	ID        string              `yaml:"id"`
	URL       string              `yaml:"url"`
	Role      worker.Role         `yaml:"role"` // [aggregated]
	Models    []string            `yaml:"models"`
	Ranks     []uint16            `yaml:"ranks"`
	RankURLs  []string            `yaml:"rank_urls"`
	Labels    []string            `yaml:"labels"`
	Engine    string              `yaml:"engine"`
	BlockSize int                 `yaml:"block_size" min:"0" max:"1048576"`
	KVEvents  []string            `yaml:"kv_events"` // ["auto"]
	KVReplay  []string            `yaml:"kv_replay"`
	Options   map[string][]string `yaml:"options"`
}

// PD is prefill/decode disaggregation.
type PD struct {
	Family string `yaml:"family"` // nixl, or off [nixl when there are prefill workers]
	// Lease is how long a prefill worker keeps blocks for decode; decode is not
	// sent later than Lease minus LeaseMargin after prefill's answer.
	Lease       time.Duration `yaml:"lease" min:"1s" max:"24h"`        // [30s]
	LeaseMargin time.Duration `yaml:"lease_margin" min:"0s" max:"24h"` // [3s]
	// CutAfter is when a non-streamed decode may be cut for a client that left
	// (it is admitted by then) [2s].
	CutAfter     time.Duration `yaml:"cut_after" min:"0s"`
	MaxAttempts  int           `yaml:"max_attempts" min:"1" max:"16"` // prefill/decode pairs [3]
	DecodeTries  int           `yaml:"decode_tries" min:"1" max:"16"` // decode workers tried with one handle [2]
	PlainDecode  bool          `yaml:"plain_decode"`                  // fall back to decode alone [true]
	PrefillLabel []string      `yaml:"prefill_labels"`
	DecodeLabel  []string      `yaml:"decode_labels"`
}

// Model overrides PD for one model.
type Model struct {
	PD *PD `yaml:"pd"`
}

// Limits bound what clients may ask of the router.
type Limits struct {
	MaxBody       int64 `yaml:"max_body" unit:"bytes" min:"1KiB"`            // bytes [32 MiB]; "32MiB" accepted
	BodyBudget    int64 `yaml:"body_budget" unit:"bytes" min:"1KiB"`         // bytes [1 GiB]
	MaxHead       int   `yaml:"max_head" unit:"bytes" min:"1KiB" max:"1MiB"` // bytes [16 KiB]
	MaxDepth      int   `yaml:"max_depth" min:"4" max:"10000"`               // [64]
	MaxConns      int   `yaml:"max_conns" min:"1"`                           // [100000]
	MaxConnsPerIP int   `yaml:"max_conns_per_ip" min:"0"`
	EngineConns   int   `yaml:"engine_conns" min:"1"` // open to one engine [4096]
}

// Timeouts of legs and waits.
type Timeouts struct {
	Head       time.Duration `yaml:"head" min:"1ms"`        // reading a request's head [10s]
	Body       time.Duration `yaml:"body" min:"1ms"`        // reading a body, plus size/256KiB/s [30s]
	KeepAlive  time.Duration `yaml:"keep_alive" min:"1ms"`  // [75s]
	Write      time.Duration `yaml:"write" min:"1ms"`       // one flush to a client [30s]
	Connect    time.Duration `yaml:"connect" min:"1ms"`     // to an engine [2s]
	Prefill    time.Duration `yaml:"prefill" min:"1ms"`     // a prefill leg [300s]
	Decode     time.Duration `yaml:"decode" min:"1ms"`      // a decode or aggregated leg [600s]
	StreamIdle time.Duration `yaml:"stream_idle" min:"1ms"` // between two reads of a stream [120s]
	PoolWait   time.Duration `yaml:"pool_wait" min:"0s"`    // for a pool without a healthy worker [5s]
	Drain      time.Duration `yaml:"drain" min:"0s"`        // streams under way at SIGTERM [30s]
}

// Health of workers.
type Health struct {
	Interval  time.Duration `yaml:"interval" min:"10ms"`           // [500ms]
	Timeout   time.Duration `yaml:"timeout" min:"1ms"`             // [1s]
	FailAfter int           `yaml:"fail_after" min:"1" max:"1000"` // [2]
	Scrape    time.Duration `yaml:"scrape" min:"10ms" off:"true"`  // [1s]; "off": -1
	// ProbeInference sends one tiny request to a worker at admission [false].
	ProbeInference bool `yaml:"probe_inference"`
}

// Tokens is where token ids come from.
type Tokens struct {
	Mode       string        `yaml:"mode" oneof:"auto engine text ids"`     // auto, engine, text, ids [auto]
	CacheBytes int64         `yaml:"cache_bytes" unit:"bytes" min:"0"`      // [64 MiB]
	Timeout    time.Duration `yaml:"timeout" min:"1ms"`                     // of /tokenize [250ms]
	MaxEngine  int64         `yaml:"max_engine_bytes" unit:"bytes" min:"0"` // larger bodies: text mode [1 MiB]
}

// Index bounds the KV index.
type Index struct {
	MaxBytes  int64         `yaml:"max_bytes" unit:"bytes" min:"1MiB"` // [1 GiB]
	ApproxTTL time.Duration `yaml:"approx_ttl" min:"1s"`               // text mode [2m]
}

// Schedule is the cost's weights; see package schedule for the formula.
type Schedule struct {
	OverlapWeight float64 `yaml:"overlap_weight" min:"0"`                            // [1]
	PrefillWeight float64 `yaml:"prefill_weight" min:"0"`                            // [1]
	DecodeWeight  float64 `yaml:"decode_weight" min:"0"`                             // [1]
	QueueWeight   float64 `yaml:"queue_weight" min:"0"`                              // [1]
	Temperature   float64 `yaml:"temperature" min:"0"`                               // [0]
	Explain       int     `yaml:"explain" min:"0" max:"10000000"`                    // records kept [10000]
	Policy        string  `yaml:"policy" oneof:"kv round_robin random least_loaded"` // kv, round_robin, random, least_loaded [kv]
}
