package config

import (
	"time"

	"sluice/router/worker"
)

// Config is the whole configuration after defaults. Values come from, each over
// the one before: the defaults, the file (Load), the environment, the flags
// (Flags.Resolve does all three, and checks the whole once). Workers add up instead: one named by environment or flag
// replaces the one of the same id and otherwise joins the file's.
//
// Field tags are the names in the file; environment names are SLUICE_ + the
// upper-cased path joined by "_" (SLUICE_TIMEOUTS_PREFILL=300s). The tags min,
// max, oneof, unit and off are the check of one field; what concerns several
// fields stands in check.go. Printing a Config hides its secrets.
type Config struct {
	Listen string `yaml:"listen"` // where clients connect; port 0 takes a free one [127.0.0.1:8080]
	TLS    TLS    `yaml:"tls"`
	Admin  Admin  `yaml:"admin"`
	Log    Log    `yaml:"log"`

	Metrics Metrics `yaml:"metrics"`

	Proxies Proxies `yaml:"proxies"`
	CORS    CORS    `yaml:"cors"`

	// APIKeys: with any, only requests that show one of these keys are served, and
	// clients' keys do not reach engines; see docs/access.md [none].
	APIKeys []APIKey `yaml:"api_keys"`
	// EngineKey is shown to every engine as a bearer token, in the place of what
	// clients show; never logged [clients' own are passed on].
	EngineKey string    `yaml:"engine_key" secret:"true"`
	EngineTLS EngineTLS `yaml:"engine_tls"`

	Workers []Worker         `yaml:"workers"`
	PD      PD               `yaml:"pd"`
	LMCache LMCache          `yaml:"lmcache"`
	Models  map[string]Model `yaml:"models"` // per-model overrides, by name

	Transfers Transfers `yaml:"transfers"`

	Limits      Limits      `yaml:"limits"`
	Compression Compression `yaml:"compression"`
	Timeouts    Timeouts    `yaml:"timeouts"`
	Health      Health      `yaml:"health"`
	Fleet       Fleet       `yaml:"fleet"`

	Relay     Relay     `yaml:"relay"`
	Migration Migration `yaml:"migration"`

	EngineAPI EngineAPI `yaml:"engine_api" was:"routed"`

	Discovery Discovery `yaml:"discovery"`
	Kube      Kube      `yaml:"kube"`
	Register  Register  `yaml:"registration" was:"register"`

	Tokens   Tokens   `yaml:"tokens"`
	Index    Index    `yaml:"index"`
	Schedule Schedule `yaml:"schedule"`
	Steering Steering `yaml:"steering"`
	Record   Record   `yaml:"recording" was:"record"`

	// StripForbidden cuts client-sent kv_transfer_params & co. out of a body
	// instead of refusing the request [false].
	StripForbidden bool `yaml:"strip_forbidden"`
	// MediaHosts are the hosts from which engines may fetch images, video and audio that
	// clients name by URL: names, "*.example.com", IP addresses, "*" for any; see
	// docs/access.md [none: clients send data: URLs].
	MediaHosts []string `yaml:"media_hosts"`

	// origins says where each value that is no default was given, by its path,
	// for the errors of checks made later.
	origins map[string]origin
	// path and again are of the file it was read from, for Reread.
	path    string
	reparse func(text []byte) (*Config, error)
	// inputWarnings are of what the file, the environment and the flags say: old names, and
	// variables that set nothing.
	inputWarnings []string
}

// Admin is the admin listener.
type Admin struct {
	Listen string `yaml:"listen"`              // loopback address of the admin API and console, or "off" [127.0.0.1:9901]
	Token  string `yaml:"token" secret:"true"` // of the admin API, 16 characters or more; never logged [$SLUICE_ADMIN_TOKEN, else random]
	// RuntimeFile is where serve writes address and token, mode 0600
	// [$XDG_RUNTIME_DIR or the temporary folder, sluice-UID/ADDR.json].
	RuntimeFile string `yaml:"runtime_file"`
}

// TLS of the clients' listener. The files are read again when they change.
type TLS struct {
	Cert       string `yaml:"cert"`                        // PEM file with the certificate and those between it and its root [plain HTTP]
	Key        string `yaml:"key"`                         // PEM file with its key [none]
	ClientCA   string `yaml:"client_ca"`                   // PEM file: clients must show a certificate signed by one of these [none]
	MinVersion string `yaml:"min_version" oneof:"1.2 1.3"` // lowest version of TLS taken [1.2]
}

// Proxies are load balancers and proxies before the router; see docs/access.md.
type Proxies struct {
	Trusted []string `yaml:"trusted"` // networks (10.0.0.0/8) and addresses of those that are believed where a connection or a request comes from [none]
	// Protocol: connections of trusted proxies begin with a header of the PROXY
	// protocol, version 1 or 2 (required; nobody else is served then), or may
	// (optional), or nobody looks for one (off) [off].
	Protocol string `yaml:"protocol" oneof:"off optional required"`
	// Forwarded is the header line in which trusted proxies name the client:
	// x-forwarded-for, forwarded (RFC 7239), or off. The other one is not looked at [off].
	Forwarded string `yaml:"forwarded" oneof:"off x-forwarded-for forwarded"`
}

// CORS lets pages of other origins use the API from a browser; see docs/access.md.
type CORS struct {
	Origins []string      `yaml:"origins"`                    // origins of pages that may, as browsers send them (https://app.example), or * for all; none: none [none]
	Methods []string      `yaml:"methods"`                    // that they may use [GET, POST]
	Headers []string      `yaml:"headers"`                    // header lines that they may send; * for all but Authorization [those of OpenAI's and Anthropic's clients]
	MaxAge  time.Duration `yaml:"max_age" min:"0s" max:"24h"` // how long a browser remembers this [10m]
}

// EngineTLS is of connections to engines whose URL is https. The files are read again
// when they change.
type EngineTLS struct {
	CA   string `yaml:"ca"`   // PEM file: engines' certificates must be signed by one of these, or be one [the system's]
	Cert string `yaml:"cert"` // PEM file with the certificate that engines are shown [none]
	Key  string `yaml:"key"`  // PEM file with its key [none]
}

// APIKey is one key that clients may show, and how much its holder may send.
type APIKey struct {
	Name              string   `yaml:"name"`                        // in logs and metrics
	SHA256            string   `yaml:"sha256" secret:"true"`        // of the key, 64 hexadecimal digits, as `sluice key` prints them
	RequestsPerMinute int64    `yaml:"requests_per_minute" min:"0"` // 0: no limit
	TokensPerMinute   int64    `yaml:"tokens_per_minute" min:"0"`   // prompts and outputs together; 0: no limit
	Models            []string `yaml:"models"`                      // it may use these; none named: all
}

// Log is logging to standard error.
type Log struct {
	Level  string `yaml:"level" oneof:"debug info warn error"` // debug, info, warn, error [info]
	Format string `yaml:"format" oneof:"text json"`            // text, json; durations are text as 1.5s in both [text]
}

// Metrics is what /metrics shows.
type Metrics struct {
	LegacyNames bool `yaml:"legacy_names"` // the former series of renamed metrics, beside the present ones, for one release: docs/upgrading.md [false]
}

// Worker is one entry of workers, or of --engine/--prefill/--decode.
type Worker struct {
	ID           string              `yaml:"id"`
	URL          string              `yaml:"url"`
	Role         worker.Role         `yaml:"role"` // [aggregated]
	Models       []string            `yaml:"models"`
	Ranks        []uint16            `yaml:"ranks"`
	StartRank    int                 `yaml:"start_rank" min:"0" max:"65535"` // [found out]
	RankURLs     []string            `yaml:"rank_urls"`
	Labels       []string            `yaml:"labels"`
	Engine       string              `yaml:"engine"`
	HealthPath   string              `yaml:"health_path"` // [health.path]
	BlockSize    int                 `yaml:"block_size" min:"0" max:"1048576"`
	KVEvents     []string            `yaml:"kv_events"` // ["auto"]
	KVReplay     []string            `yaml:"kv_replay"`
	LoadEvents   []string            `yaml:"load_events"` // [SGLang is asked]
	MaxRequests  int64               `yaml:"max_requests" min:"0"`
	RankRequests int64               `yaml:"rank_requests" min:"0"` // [limits.rank_requests]
	RankTokens   int64               `yaml:"rank_tokens" min:"0"`   // [limits.rank_tokens]
	Options      map[string][]string `yaml:"options"`
}

// PD is prefill/decode disaggregation.
type PD struct {
	Family string `yaml:"family"` // how prefill hands over to decode: nixl, sglang, …, or off; sluice check lists all [nixl when there are prefill workers]
	// Lease is how long a prefill worker keeps blocks for decode; decode is not
	// sent later than Lease minus LeaseMargin after prefill's answer.
	Lease       time.Duration `yaml:"lease" min:"1s" max:"24h"`        // [30s]
	LeaseMargin time.Duration `yaml:"lease_margin" min:"0s" max:"24h"` // decode is sent no later than lease minus this after prefill answered [3s]
	// AbortDelay is how long a decode that was sent after prefill, or together with it, runs
	// before it is cut for a client that left, so that its engine has taken the request in: a
	// stream so long behind its head, if no event comes first; another for so long at least,
	// and its engine must also have answered a later question [500ms].
	AbortDelay time.Duration `yaml:"abort_delay" was:"cut_after" min:"0s"`
	// AbandonedDecode is how long a decode that is not streamed goes on for a client that
	// left, where its engine is vLLM 0.21 or later without Sluice's connector. Cut, such a
	// decode makes its prefill engine log "Potentially invalid KV blocks" and count a
	// notification after expiry. 0 cuts it as soon as abort_delay allows [10s].
	AbandonedDecode time.Duration `yaml:"abandoned_decode_timeout" was:"abandoned_decode" min:"0s"`
	// NotifyWait is how long after prefill's answer the completions of a transfer are awaited
	// that come from elsewhere (family lmcache), never beyond lease minus lease_margin; then
	// others run the request, or it is refused (kv_not_written) where no other decode worker
	// is left, and a worker that is silent again and again gets no more. 0: they are not
	// awaited, for prefill workers with pd_skip_proxy_notification [5s].
	NotifyWait  time.Duration `yaml:"completion_timeout" was:"notify_wait" min:"0s"`
	MaxAttempts int           `yaml:"max_attempts" min:"1" max:"16"`                       // prefill/decode pairs tried for one request, but for those whose connection was refused [3]
	DecodeTries int           `yaml:"decode_attempts" was:"decode_tries" min:"1" max:"16"` // decode workers that one handle is offered to, while no engine has seen it [2]
	PlainDecode bool          `yaml:"decode_only_fallback" was:"plain_decode"`             // when prefill cannot be had, decode does the whole request at once; false: it waits for a prefill worker [true]
	// LocalPrefillTokens: no remote prefill where a decode worker would have fewer
	// tokens of the prompt left to compute [0: always remote].
	LocalPrefillTokens int `yaml:"local_prefill_tokens" min:"0"`
	// LocalWhenFaster: no remote prefill where a decode worker is estimated to come
	// to the first token sooner alone: queues and rates of both sides, the transfer [false].
	LocalWhenFaster bool     `yaml:"local_when_faster"`
	PrefillLabel    []string `yaml:"prefill_labels"` // only prefill workers with one of these labels are chosen [all]
	DecodeLabel     []string `yaml:"decode_labels"`  // only decode workers with one of these labels are chosen [all]
	// CacheHitThreshold is the share of a prompt, 0 to 1, that a decode worker
	// must hold to do a request alone (family storage); 0: prefill always [0].
	CacheHitThreshold float64 `yaml:"cache_hit_threshold" min:"0" max:"1"`
	// ReasoningParser says that decode workers parse reasoning, which an answer
	// to token ids would not show: chat then runs on one worker (family lmcache) [false].
	ReasoningParser bool `yaml:"reasoning_parser"`
}

// LMCache is what family lmcache needs beside its workers' own ports.
type LMCache struct {
	// ProxyHost and ProxyPort are where prefill workers push that KV has been
	// written (their pd_proxy_host and pd_proxy_port) [127.0.0.1].
	ProxyHost string   `yaml:"proxy_host"`
	ProxyPort int      `yaml:"proxy_port" min:"0" max:"65535"` // likewise; 0 takes a free one [8500]
	Networks  []string `yaml:"networks"`                       // CIDRs that prefill workers push from; others' connections are closed [any]
	PeerHost  string   `yaml:"peer_host"`                      // host of the decode workers' ports, for workers without peer_host [that of their URL]
	InitPort  []string `yaml:"peer_init_port"`                 // for decode workers without init_port, one a tensor-parallel rank
	AllocPort []string `yaml:"peer_alloc_port"`                // for decode workers without alloc_port, likewise
	// FinishedReqTTL is how long a notification is kept that no request waits for [300s].
	FinishedReqTTL  time.Duration `yaml:"finished_req_ttl" min:"1s" bare:"s"`
	CleanupInterval time.Duration `yaml:"cleanup_interval" min:"1s" bare:"s"` // between two looks for such [60s]
}

// Transfers is how the router is told what became of KV transfers, best means
// first: NIXL, UCX, ZMQ, and always the engines' HTTP answers. See docs/nixl.md.
type Transfers struct {
	// NIXL: an agent of the router's own. auto: where engines can learn of it (the
	// registration listener is on) or the side channel is used, a model hands over
	// by NIXL and the library is found; it costs 30 MB of memory and two threads.
	// Off loads nothing [auto].
	NIXL        string   `yaml:"nixl" oneof:"auto on off"`
	NIXLLibrary string   `yaml:"nixl_library"` // libnixl_capi's file or folder, and then nothing else is tried [looked for, see docs/nixl.md]
	Python      []string `yaml:"python"`       // the engines' Python environments, whose own NIXL is tried first [none]
	// UCX: active messages of the connector's, for engines without NIXL. auto: where
	// engines can learn of it, a model hands over by NIXL and libucp is found; idle
	// it costs nothing, beside NIXL 5 MB [auto].
	UCX        string `yaml:"ucx" oneof:"auto on off"`
	UCXLibrary string `yaml:"ucx_library"` // libucp's file or folder, and then nothing else is tried [NIXL's own, else looked for]
	// UCXDevices are the network devices that UCX listens on [those with an address in registration.networks].
	UCXDevices []string `yaml:"ucx_devices"`
	UCXPorts   string   `yaml:"ucx_ports"` // TCP ports it listens on, FROM-TO, one for each device at least [any free ones]
	// Isolate keeps each agent, of NIXL and of UCX, in a process of its own (this
	// binary again, 50 MB each), so that a crash inside of their libraries costs the
	// tier for a second and not the router [false].
	Isolate bool `yaml:"isolate"`
	// ZMQ: a PULL socket for the connector's reports. auto: with zmq_listen, or
	// where engines can learn of it and a model hands over by NIXL. On asks for
	// zmq_listen or registration.listen, whatever the models' families [auto].
	ZMQ         string   `yaml:"zmq" oneof:"auto on off"`
	ZMQListen   string   `yaml:"zmq_listen"`                                                // tcp://HOST:PORT of that socket [a free port of registration.listen's host]
	ZMQNetworks []string `yaml:"zmq_networks"`                                              // CIDRs whose reports it takes; others' connections are closed [registration.networks; without registration.listen any]
	BoardSlots  int      `yaml:"completion_slots" was:"board_slots" min:"64" max:"1048576"` // hand-overs that may be waited for at once by a record of 64 bytes; a multiple of 64 [16384]
	// StallTimeout is how long a decode whose engine runs the connector may be
	// without a word of its transfer and without an answer; then the pair is run
	// again. 0 waits as long as timeouts.decode [0].
	StallTimeout time.Duration `yaml:"stall_timeout" min:"0s"`
	// SideChannel is what the router does, by NIXL, to prefill engines of plain
	// vLLM (0.22 to 0.33): renew the leases of requests it holds between the legs,
	// and release the blocks of abandoned ones as well; or off [off].
	SideChannel string `yaml:"side_channel" oneof:"off renew release"`
}

// Model overrides PD for one model.
type Model struct {
	PD *PD `yaml:"pd"`
}

// Limits bound what clients may ask of the router.
type Limits struct {
	MaxBody       int64 `yaml:"max_body" unit:"bytes" min:"1KiB"`                        // largest request body; 413 beyond; at most a quarter of memory_budget [32MiB]
	BodyBudget    int64 `yaml:"memory_budget" was:"body_budget" unit:"bytes" min:"1KiB"` // memory of all bodies together; 503 beyond; at least four times max_body [1GiB]
	MaxHead       int   `yaml:"max_head" unit:"bytes" min:"1KiB" max:"1MiB"`             // largest request head; 431 beyond [16KiB]
	MaxDepth      int   `yaml:"max_depth" min:"4" max:"1024"`                            // nesting of objects and arrays in a body, 1024 at most [64]
	MaxConns      int   `yaml:"max_conns" min:"1"`                                       // client connections [100000]
	MaxConnsPerIP int   `yaml:"max_conns_per_ip" min:"0"`                                // client connections from one address; of a client behind proxies.forwarded, requests under way; 0: no limit [0]
	EngineConns   int   `yaml:"engine_conns" min:"1"`                                    // connections open to one engine [4096]
	PoolWaiters   int   `yaml:"pool_waiters" min:"0"`                                    // requests that wait for a healthy worker at once; 503 beyond, 0: no limit [1000]
	RankRequests  int64 `yaml:"rank_requests" min:"0"`                                   // requests under way on one rank; 429 when all that could take one are full, 0: no limit [0]
	RankTokens    int64 `yaml:"rank_tokens" min:"0"`                                     // prompt tokens waiting to be computed on one rank, by this router's count; likewise [0]
}

// Compression of answers, by what the client's Accept-Encoding likes best of zstd
// and gzip. Requests in either are always read: limits.max_body bounds what they hold.
type Compression struct {
	MinBytes int `yaml:"min_bytes" unit:"bytes" min:"0" max:"1GiB"` // answers of so many bytes and more that are no streams (over 1 MiB or of no told length: JSON, 32 at once); 0: none [2KiB]
	// Streams: streams too, each event flushed. A quarter of the bytes or less, for
	// the price of relaying on a goroutine and some 10 µs of CPU an event [false].
	Streams bool `yaml:"streams"`
}

// Timeouts of legs and waits.
type Timeouts struct {
	Head       time.Duration `yaml:"head" min:"1ms"`                // reading a request's head [10s]
	Body       time.Duration `yaml:"body" min:"1ms"`                // reading a body, plus size/256KiB/s [30s]
	BodyIdle   time.Duration `yaml:"body_idle" min:"1ms"`           // of that time, without a byte of the body (over TLS up to a quarter more); then 408 [15s]
	KeepAlive  time.Duration `yaml:"keep_alive" min:"1ms"`          // an idle client connection is kept [75s]
	Write      time.Duration `yaml:"write" min:"1ms"`               // one flush to a client [30s]
	Connect    time.Duration `yaml:"connect" min:"1ms"`             // connecting to an engine [2s]
	EngineIdle time.Duration `yaml:"engine_idle" min:"1ms"`         // a connection to an engine that is not used is kept; less than the engine's own time, which is 5s for uvicorn [4s]
	EngineAge  time.Duration `yaml:"engine_age" min:"0s"`           // maximum age of a pooled engine connection, ±12.5 % jitter, so that a name or a load balancer in front is resolved again; 0: unlimited [1h]
	Prefill    time.Duration `yaml:"prefill" min:"1ms"`             // a prefill leg in all [300s]
	Decode     time.Duration `yaml:"decode" min:"1ms"`              // a decode or aggregated leg in all [600s]
	FirstByte  time.Duration `yaml:"first_byte" min:"1ms"`          // from a streamed decode or aggregated request's last byte to its answer's head; then another worker is tried [300s]
	StreamIdle time.Duration `yaml:"stream_idle" min:"1ms"`         // between two reads of a stream [120s]
	PoolWait   time.Duration `yaml:"pool_wait" min:"0s"`            // a request waits for a pool without a healthy worker, at its arrival and before its retries; then 503 [5s]
	DrainDelay time.Duration `yaml:"drain_delay" min:"0s"`          // from /readyz 503 to the end of accepting at SIGTERM, for load balancers that learn of it by asking; 0: 1s at most, while there are requests [0s]
	Restart    time.Duration `yaml:"restart" min:"100ms" max:"10m"` // a new process has to be ready at a hot restart; else this one goes on [60s]
	Drain      time.Duration `yaml:"drain" min:"0s"`                // streams under way are let go on at SIGTERM [30s]
}

// Relay is when a stream's head goes out, and what drives streams from then on; see
// docs/relay.md.
type Relay struct {
	// HeadAfter: a stream's head goes to its client so long after the request was given
	// to an engine, at the latest, 0 at once. What fails from then on is told by an
	// event, with status 200, and headers that name the workers are missing; -1 or
	// "off": the head goes out with the engine's own [off].
	HeadAfter time.Duration `yaml:"early_headers_after" was:"head_after" min:"0s" off:"true"`
	// KeepAlive is how often a comment goes to a client whose stream has begun and who
	// waits for the engine's first byte, so that load balancers in front do not cut
	// it, 10ms or more; 0: never [0s].
	KeepAlive time.Duration `yaml:"comment_interval" was:"keep_alive" min:"0s"`

	Driver  string `yaml:"driver" oneof:"loop goroutine"` // loop (event loops over epoll; goroutines where the kernel refuses them) or goroutine (one for each stream) [loop]
	Threads int    `yaml:"threads" min:"0" max:"256"`     // event loops; 0: one for each CPU [0]
}

// Migration of streams whose engine fails under way; see docs/migration.md.
type Migration struct {
	Max    int      `yaml:"max_attempts" was:"max" min:"0" max:"8"` // how often one stream may go on from another engine when its own has failed; 0: never [1]
	Tokens string   `yaml:"tokens" oneof:"auto client"`             // where a stream's token ids come from: auto (engines that can are asked for them, and they are taken out), client (only streams whose client asked for them) [auto]
	Allow  []string `yaml:"allow"`                                  // go on although the text may differ from an undisturbed one's: stop, penalties, bad_words, seed, retokenized; or its log-probabilities, by noise: logprobs; or though n choices go on as prompts of one request: many_choices [none]

	// Structured is what becomes of a stream whose text is held to a grammar (response_format,
	// guided_*, structured_outputs): error (it ends with an error event), exact (it goes on where
	// what is left of the grammar can be said: a choice among texts), unconstrained (and where it
	// cannot, without the grammar: what the client gets may not be what it asked for) [error].
	Structured string `yaml:"structured" oneof:"error exact unconstrained"`

	HandoverTokens int           `yaml:"handover_tokens" min:"0"`                                 // a stream that migrates in a pool with prefill workers runs prefill and decode again when the decode worker would have to compute so many tokens; 0: always [4096]
	DrainAfter     time.Duration `yaml:"drain_delay" was:"drain_after" min:"0s" off:"true"`       // streams of a worker that drains or has left move to another after so long; -1 or "off": never [10s]
	TokenizeWait   time.Duration `yaml:"tokenize_timeout" was:"tokenize_wait" min:"1ms" max:"1m"` // for an engine's tokenizer, where the text told must be made ids again [2s]
}

// MigrationAllow lists the words of migration.allow.
var MigrationAllow = []string{"stop", "penalties", "bad_words", "seed", "retokenized", "logprobs", "many_choices"}

// EngineAPI is the router as an engine, for callers who tokenize themselves; see
// docs/engine-api.md. It is off until one of http, unix_socket and listen is given.
type EngineAPI struct {
	HTTP   bool   `yaml:"http"`                   // POST /v1/routed/generate is served [false]
	Unix   string `yaml:"unix_socket" was:"unix"` // path of the framed socket; who may write to the file may call [none]
	Listen string `yaml:"listen"`                 // TCP address of the framed socket, or "off" [off]
	Token  string `yaml:"token" secret:"true"`    // that callers of the socket must show, 16 characters or more; never logged [none]

	// Keys says who must show an API key, where there are api_keys: all, or tcp: not the
	// callers of the unix socket, whose file's permissions say who may call [all].
	Keys string `yaml:"require_api_keys" was:"keys" oneof:"all tcp"`

	TLSCert string `yaml:"tls_cert"` // PEM file with the TCP socket's certificate; read again when it changes [plain TCP]
	TLSKey  string `yaml:"tls_key"`  // PEM file with its key [none]
	// VLLM is the API by which vLLM's workers are asked: completions
	// (/v1/completions with return_token_ids), generate (/inference/v1/generate,
	// which does not detokenize), or auto: generate where all workers of a model have
	// it (0.20) and the family hands it over, else completions [auto].
	VLLM  string   `yaml:"vllm_dialect" was:"vllm" oneof:"auto completions generate"`
	Hosts []string `yaml:"allowed_hosts" was:"hosts"` // networks, addresses and names that a caller's prefill_result and bootstrap_info may name; a wide network means no loopback or link-local address [none]

	MinWorkers int           `yaml:"min_workers" min:"0" max:"4096"`          // the socket opens when so many workers are ready, whatever their role [1]
	StartWait  time.Duration `yaml:"start_timeout" was:"start_wait" min:"0s"` // then it opens with what there is [60s]

	MaxConns   int           `yaml:"max_conns" min:"1"`                            // connections of the socket [256]
	MaxStreams int           `yaml:"max_streams" min:"1" max:"1000000"`            // requests under way on one of them [16384]
	MaxFrame   int64         `yaml:"max_frame" unit:"bytes" min:"4KiB" max:"1GiB"` // largest request; at most a quarter of limits.memory_budget [8MiB]
	Heartbeat  time.Duration `yaml:"heartbeat" min:"100ms"`                        // of silence before a ping; three times that close the connection [15s]
}

// Health of workers.
type Health struct {
	Interval      time.Duration `yaml:"interval" min:"10ms"`                                     // between two probes of a worker in use; in a fleet of more than 64, idle workers are probed more seldom, so that a dead one is out within 5s [500ms]
	Timeout       time.Duration `yaml:"timeout" min:"1ms"`                                       // of one probe; 3s at least until the engine is known, for SGLang's /health takes over 1s [1s]
	Path          string        `yaml:"path"`                                                    // that probes ask, as /healthz; a worker's health_path goes over it [the first that an engine has of /health, /ping and /v1/models; of SGLang /ready, /ping]
	FailAfter     int           `yaml:"unhealthy_threshold" was:"fail_after" min:"1" max:"1000"` // failures in a row that take a worker out [2]
	Scrape        time.Duration `yaml:"metrics_interval" was:"scrape" min:"10ms" off:"true"`     // between two readings of an engine's /metrics; longer in a fleet of more than 64 workers, 15s at most; -1 or "off": never [1s]
	BreakAfter    int           `yaml:"breaker_failures" was:"break_after" min:"1" max:"1000"`   // failures in a row (connection failures, 500, 502, 504; never a 4xx) that open the breaker of one rank [5]
	BreakFor      time.Duration `yaml:"breaker_open_time" was:"break_for" min:"10ms" max:"30s"`  // an open breaker keeps the rank out; twice as long each time, 30s at most [1s]
	FrozenProcess time.Duration `yaml:"frozen_process" min:"100ms" off:"true"`                   // an engine that accepts connections and has shown no sign of life (probe, byte, KV event, counter) for so long is frozen: its calls are ended and run elsewhere; -1 or "off": never [10s]
	FrozenCore    time.Duration `yaml:"frozen_core" min:"100ms" off:"true"`                      // the same of one whose API server answers, while nothing advances of the requests it runs; to it comes three times what its longest prompt is expected to take [30s]
	FrozenHost    time.Duration `yaml:"frozen_host" min:"100ms" off:"true"`                      // the same of one to which no connection can be made, refused ones aside [10s]
	// ProbeInference sends one tiny request to a worker at admission [false].
	ProbeInference bool `yaml:"probe_inference"`
}

// Fleet is what the workers are together.
type Fleet struct {
	MinWorkers     int           `yaml:"min_workers" min:"0" max:"4096"`                             // at start /readyz waits for so many ready workers, whatever their role [0]
	StartWait      time.Duration `yaml:"start_timeout" was:"start_wait" min:"0s"`                    // it waits no longer for min_workers, and goes on with what there is [60s]
	RetryShare     float64       `yaml:"retry_budget_ratio" was:"retry_share" min:"0" max:"1"`       // retries a pool is granted for each of its requests, so that retries never double an overload [0.2]
	RetryPerSecond float64       `yaml:"retry_budget_min_per_second" was:"retry_per_second" min:"0"` // retries a pool is granted beside those [3]
}

// Discovery is where workers come from beside this configuration.
type Discovery struct {
	File     string        `yaml:"file"`                                          // a YAML file with nothing but workers, read again when it changes [none]
	FilePoll time.Duration `yaml:"file_poll_interval" was:"file_poll" min:"10ms"` // between two looks at that file, and at the configuration's own for its workers [1s]
	DNS      []DNS         `yaml:"dns"`                                           // names that are looked up again and again; see docs/discovery.md [none]
}

// DNS is one name whose addresses are workers.
type DNS struct {
	Name        string        `yaml:"name"`                                          // taken as it is, without search domains
	Type        string        `yaml:"type" oneof:"a srv"`                            // a: A and AAAA, srv: SRV
	Role        worker.Role   `yaml:"role"`                                          // of every worker found
	Port        int           `yaml:"port" min:"0" max:"65535"`                      // of the engines, for type a
	Scheme      string        `yaml:"scheme" oneof:"http https"`                     // http
	Server      string        `yaml:"server"`                                        // HOST:PORT of a DNS server; those of /etc/resolv.conf
	MinInterval time.Duration `yaml:"min_interval" was:"least" min:"100ms"`          // asked again after the answer's TTL, not before this
	MaxInterval time.Duration `yaml:"max_interval" was:"most" min:"100ms" max:"24h"` // and not after this
	Worker      *Worker       `yaml:"worker"`                                        // what else is true of every worker found
}

// Kube finds pods by label.
type Kube struct {
	Selector      string   `yaml:"selector"`                  // label selector of pods that are workers, as app in (prefill,decode); none turns this off [none]
	Namespace     string   `yaml:"namespace"`                 // of the pods; "*" for all [the router's own]
	Kubeconfig    string   `yaml:"kubeconfig"`                // a kubeconfig file; without one the pod's service account [none]
	RoleLabel     string   `yaml:"role_label"`                // label whose value says the role [app]
	PrefillValues []string `yaml:"prefill"`                   // values of role_label that mean a prefill worker [prefill]
	DecodeValues  []string `yaml:"decode"`                    // values that mean a decode worker; any other is aggregated [decode]
	ModelLabel    string   `yaml:"model_label"`               // label whose value is the model's name [the engine is asked]
	Port          string   `yaml:"port"`                      // number, or name of a container's port, of the engine's HTTP server [8000]
	Scheme        string   `yaml:"scheme" oneof:"http https"` // of that server [http]
	Worker        *Worker  `yaml:"worker"`                    // what else is true of every worker found: engine, ranks, labels, kv_events, options [nothing]
}

// Register is the listener where workers register themselves.
type Register struct {
	Listen     string        `yaml:"listen"`                         // its address, or "off" [off]
	Token      string        `yaml:"token" secret:"true"`            // that workers must show, 16 characters or more; never logged [none]
	TLSCert    string        `yaml:"tls_cert"`                       // PEM file with the listener's certificate [plain HTTP]
	TLSKey     string        `yaml:"tls_key"`                        // PEM file with its key [none]
	ClientCA   string        `yaml:"client_ca"`                      // PEM file: workers must show a certificate signed by one of these; instead of a token, or with one [none]
	Networks   []string      `yaml:"networks"`                       // CIDRs (by flag: --set registration.networks=10.0.0.0/16,fd00::/8): who may call, and where every address that a worker names must lie; loopback and link-local addresses only where a network lies within those ranges [loopback, when it listens there]
	Lease      time.Duration `yaml:"lease" min:"1s" max:"10m"`       // a worker that is not heard of for so long is taken out, unless it asks for another [15s]
	MaxLease   time.Duration `yaml:"max_lease" min:"1s" max:"24h"`   // longest lease that a worker may ask for [5m]
	MaxWorkers int           `yaml:"max_workers" min:"1" max:"4096"` // registered at once [1024]
}

// Tokens is where token ids come from.
type Tokens struct {
	Mode       string        `yaml:"mode" oneof:"auto engine text ids"`     // where token ids come from beside the request's own: auto (the engine, else text), engine, text, ids [auto]
	CacheBytes int64         `yaml:"cache_bytes" unit:"bytes" min:"0"`      // memory of the cache of tokenized prompts [64MiB]
	Timeout    time.Duration `yaml:"timeout" min:"1ms"`                     // of one call to an engine's /tokenize; then text mode [250ms]
	MaxEngine  int64         `yaml:"max_engine_bytes" unit:"bytes" min:"0"` // larger bodies are not sent to /tokenize: text mode [1MiB]
}

// Index bounds the KV index.
type Index struct {
	MaxBytes int64 `yaml:"max_bytes" unit:"bytes" min:"1MiB"` // memory of the KV index [1GiB]
	// Snapshot is a file that the index is written to now and then and at a clean
	// end, and read from at the start, so that a restarted router knows at once what
	// engines hold; empty: none [empty].
	Snapshot         string        `yaml:"snapshot"`
	SnapshotInterval time.Duration `yaml:"snapshot_interval" min:"1s"` // between two snapshots [5m]
	ApproxTTL        time.Duration `yaml:"approx_ttl" min:"1s"`        // how long a choice is believed to have left its blocks in a cache, for engines without events [2m]
}

// Record writes every event, choice and outcome to files, for sluice replay.
type Record struct {
	Dir      string `yaml:"dir"`                               // where recordings go, made with mode 0700; block hashes are written, never text or tokens; empty: nothing is recorded [empty]
	MaxFile  int64  `yaml:"max_file" unit:"bytes" min:"1MiB"`  // a file of about so much is followed by the next [64MiB]
	MaxTotal int64  `yaml:"max_total" unit:"bytes" min:"2MiB"` // of all recordings in dir; the oldest are deleted first [1GiB]
}

// Schedule is the cost's weights; see package schedule for the formula.
type Schedule struct {
	OverlapWeight float64 `yaml:"overlap_weight" min:"0"`                                    // how much a cached token counts against the prompt, 1 in full [1]
	PrefillWeight float64 `yaml:"prefill_weight" min:"0"`                                    // of the prefill work left [1]
	DecodeWeight  float64 `yaml:"decode_weight" min:"0"`                                     // of the decode blocks in use and reserved [1]
	QueueWeight   float64 `yaml:"queue_weight" min:"0"`                                      // of the load queued before [1]
	HostWeight    float64 `yaml:"host_weight" min:"0" max:"1"`                               // what a token held in the engine's host memory is worth of one on the device [0.8]
	DiskWeight    float64 `yaml:"disk_weight" min:"0" max:"1"`                               // the same of one on its disk [0.5]
	PendingWeight float64 `yaml:"in_flight_weight" was:"awaited_weight" min:"0" max:"1"`     // the same of one just sent to the worker, of which no event has told yet; 0 does not count them [0.9]
	PrefillMS     float64 `yaml:"prefill_ms" min:"0" max:"1000"`                             // ms to compute one prompt token; 0: learned from each worker [0]
	TransferMS    float64 `yaml:"transfer_ms" min:"0" max:"1000"`                            // ms to pull one prompt token's KV from a prefill worker; 0: learned [0]
	BlockMS       float64 `yaml:"block_ms" min:"0" max:"1000"`                               // ms that a KV block resident in the batch costs a request over its decode; 0: learned [0]
	Temperature   float64 `yaml:"temperature" min:"0"`                                       // 0 takes the least cost; more spreads choices around it [0]
	Explain       int     `yaml:"explain" min:"0" max:"10000000"`                            // decisions kept for sluice explain [10000]
	Policy        string  `yaml:"policy" oneof:"kv round_robin random least_loaded session"` // kv, or to compare with: round_robin, random, least_loaded, session [kv]
}

// Steering is what clients may ask of the choice by headers.
type Steering struct {
	Pins []string `yaml:"pinning" was:"pins"` // who may name workers, by X-Sluice-Worker and X-Sluice-Allowed-Workers: networks (10.0.0.0/8), unix (callers of the routed unix socket), any, or off [unix]
	// PrefillOnly is what asks for a prompt to be computed and kept, with nothing
	// generated: any (X-Sluice-Prefill-Only: true, or max_tokens: 0), header (only
	// that; a max_tokens of 0 goes to the engine), or off [header].
	PrefillOnly string `yaml:"prefill_only" oneof:"any header off"`
}
