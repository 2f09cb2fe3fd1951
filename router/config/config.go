package config

import (
	"time"

	"sluice/router/worker"
)

// Config is the whole configuration after defaults. The file (Load) overrides the defaults, the
// environment the file, and flags the environment; Flags.Resolve reads all and checks the
// result once. Workers are added instead: a worker of the environment or a flag replaces the
// one with the same id.
//
// The tag yaml is the name in the file, and was the name before it (RenamedFields). The name of
// an environment variable is SLUICE_ and the path in capitals, joined by "_"
// (SLUICE_TIMEOUTS_PREFILL=300s). The tags min, max, oneof, unit and off are the check of one
// field; check.go has the checks that concern several fields. Printing a Config hides its
// secrets.
type Config struct {
	Listen string `yaml:"listen"` // address of the clients' listener; port 0 selects a free port [127.0.0.1:8080]
	TLS    TLS    `yaml:"tls"`
	Admin  Admin  `yaml:"admin"`
	Log    Log    `yaml:"log"`

	AccessLog AccessLog `yaml:"access_log"`
	Tracing   Tracing   `yaml:"tracing"`
	Metrics   Metrics   `yaml:"metrics"`

	Proxies Proxies `yaml:"proxies"`
	CORS    CORS    `yaml:"cors"`

	// APIKeys are the keys of clients. If there is one, a request without a valid key is
	// refused, and clients' keys are not sent to engines; see docs/access.md [none].
	APIKeys []APIKey `yaml:"api_keys"`
	// EngineKey is the bearer token that the router sends to every engine in place of the
	// client's; never logged [the client's Authorization is passed on].
	EngineKey string    `yaml:"engine_key" secret:"true"`
	EngineTLS EngineTLS `yaml:"engine_tls"`

	Workers []Worker         `yaml:"workers"` // engines with their URLs and roles; discovery and registration add others
	PD      PD               `yaml:"pd"`
	LMCache LMCache          `yaml:"lmcache"`
	Models  map[string]Model `yaml:"models"` // per-model overrides, by name

	Transfers Transfers `yaml:"transfers"`

	Limits      Limits      `yaml:"limits"`
	Admission   Admission   `yaml:"admission"`
	Compression Compression `yaml:"compression"`
	Timeouts    Timeouts    `yaml:"timeouts"`
	Health      Health      `yaml:"health"`
	Fleet       Fleet       `yaml:"fleet"`

	Relay     Relay     `yaml:"relay"`
	Migration Migration `yaml:"migration"`

	EngineAPI EngineAPI `yaml:"engine_api" was:"routed"`

	Discovery    Discovery    `yaml:"discovery"`
	Kube         Kube         `yaml:"kube"`
	Registration Registration `yaml:"registration" was:"register"`

	Tokens    Tokens    `yaml:"tokens"`
	Index     Index     `yaml:"index"`
	Schedule  Schedule  `yaml:"schedule"`
	Steering  Steering  `yaml:"steering"`
	Sessions  Sessions  `yaml:"sessions"`
	Recording Recording `yaml:"recording" was:"record"`

	// StripForbidden removes kv_transfer_params and similar members from a client's body;
	// otherwise the router refuses the request [false].
	StripForbidden bool `yaml:"strip_forbidden"`
	// MediaHosts are the hosts from which engines may fetch images, video and audio that
	// clients name by URL: names, "*.example.com", IP addresses, "*" for any; see
	// docs/access.md [none: clients send data: URLs].
	MediaHosts []string `yaml:"media_hosts"`

	// origins maps the path of each value that is not a default to its place in the file, for
	// the errors of later checks.
	origins map[string]origin
	// path and reparse are the file that the configuration was read from and its parser, for
	// Reread.
	path    string
	reparse func(text []byte) (*Config, error)
	// inputWarnings are the warnings about the file, the environment and the flags: old names,
	// and variables that set nothing.
	inputWarnings []string
}

// Admin is the admin listener.
type Admin struct {
	Listen string `yaml:"listen"`              // loopback address of the admin API and console, or "off" [127.0.0.1:9901]
	Token  string `yaml:"token" secret:"true"` // bearer token of the admin API, 16 characters or more; never logged [$SLUICE_ADMIN_TOKEN, else random]
	// RuntimeFile is the file to which serve writes the address and the token, with mode 0600
	// [sluice-UID/ADDR.json in $XDG_RUNTIME_DIR or the temporary folder; if that cannot be written, a
	// warning].
	RuntimeFile string `yaml:"runtime_file"`
	// Timelines is the number of newest requests whose timelines the console shows, and of the
	// newest failed, migrated and slow (tracing.slow) ones apart from these. Above 100 requests a
	// second it is a sample, unless there is an access log or tracing. 0: none [1000].
	Timelines int `yaml:"timelines" min:"0" max:"100000"`
}

// TLS of the clients' listener. The files are read again when they change.
type TLS struct {
	Cert       string `yaml:"cert"`                        // PEM file with the certificate and its intermediates [plain HTTP]
	Key        string `yaml:"key"`                         // PEM file with its key [none]
	ClientCA   string `yaml:"client_ca"`                   // PEM file with the CAs of client certificates; if set, clients must have one [none]
	MinVersion string `yaml:"min_version" oneof:"1.2 1.3"` // lowest TLS version that is accepted [1.2]
}

// Proxies are load balancers and proxies before the router; see docs/access.md.
type Proxies struct {
	Trusted []string `yaml:"trusted"` // networks (10.0.0.0/8) and addresses of proxies that may state the client's address [none]
	// Protocol is the PROXY protocol, version 1 or 2. required: every connection comes from a
	// trusted proxy and begins with its header, others are closed; optional: connections of
	// trusted proxies may begin with it; off: it is not parsed [off].
	Protocol string `yaml:"protocol" oneof:"off optional required"`
	// Forwarded is the header field in which trusted proxies name the client:
	// x-forwarded-for, forwarded (RFC 7239), or off. The other field is ignored [off].
	Forwarded string `yaml:"forwarded" oneof:"off x-forwarded-for forwarded"`
}

// CORS lets pages of other origins use the API from a browser; see docs/access.md.
type CORS struct {
	Origins []string      `yaml:"origins"`                    // allowed origins, as browsers send them (https://app.example), or * for all [none]
	Methods []string      `yaml:"methods"`                    // allowed methods [GET, POST]
	Headers []string      `yaml:"headers"`                    // allowed request header fields; * for all but Authorization [those of OpenAI's and Anthropic's clients]
	MaxAge  time.Duration `yaml:"max_age" min:"0s" max:"24h"` // how long a browser may cache the preflight response [10m]
}

// EngineTLS is TLS of connections to engines whose URL is https. The files are read again when
// they change.
type EngineTLS struct {
	CA   string `yaml:"ca"`   // PEM file with CA certificates, or with the engines' own certificates, that an engine's certificate is checked against [the system's CAs]
	Cert string `yaml:"cert"` // PEM file with the client certificate for engines [none]
	Key  string `yaml:"key"`  // PEM file with its key [none]
}

// APIKey is one key of clients with its limits.
type APIKey struct {
	Name              string   `yaml:"name"`                        // name in logs and metrics
	SHA256            string   `yaml:"sha256" secret:"true"`        // SHA-256 hash of the key, 64 hexadecimal digits, as `sluice key` prints it
	RequestsPerMinute int64    `yaml:"requests_per_minute" min:"0"` // requests per minute; 0: no limit
	TokensPerMinute   int64    `yaml:"tokens_per_minute" min:"0"`   // prompt and output tokens per minute; 0: no limit
	Models            []string `yaml:"models"`                      // models that the key may use; empty: all
	// Classes are the admission classes that the key's requests may ask for; the first is that of
	// requests that ask for none [the class of the model, else the default class].
	Classes []string `yaml:"classes"`
	Weight  int      `yaml:"weight" min:"0" max:"1000"` // share of the key's tenant among the tenants of a class; 0: 1 [1]
}

// Log is logging to standard error.
type Log struct {
	Level  string `yaml:"level" oneof:"debug info warn error"` // debug, info, warn, error [info]
	Format string `yaml:"format" oneof:"text json"`            // text, json; in both a duration is a string such as 1.5s [text]
}

// AccessLog has one line of JSON for each request; see docs/request-log.md.
type AccessLog struct {
	Output   string  `yaml:"output"`                           // stdout, file:/PATH (rotated), syslog, syslog://HOST:PORT, syslog+tcp://HOST:PORT, or "off" [off]
	Sample   float64 `yaml:"sample" min:"0" max:"1"`           // share of successful requests that are logged; failed ones always are [1]
	MaxFile  int64   `yaml:"max_file" unit:"bytes" min:"1MiB"` // size at which a file is rotated [100MiB]
	MaxFiles int     `yaml:"max_files" min:"1" max:"1000"`     // number of rotated files that are kept [5]
}

// Tracing exports OpenTelemetry traces over OTLP. OTEL_* variables apply where a field is not set;
// see docs/request-log.md.
type Tracing struct {
	Endpoint string        `yaml:"endpoint"`                        // URL of the collector, as http://127.0.0.1:4318 [$OTEL_EXPORTER_OTLP_ENDPOINT; without one there are no traces]
	Protocol string        `yaml:"protocol" oneof:"auto grpc http"` // grpc, http (protobuf), or auto: $OTEL_EXPORTER_OTLP_PROTOCOL, else http [auto]
	Sample   float64       `yaml:"sample" min:"0" max:"1"`          // share of requests that are traced if their client sends no traceparent; $OTEL_TRACES_SAMPLER overrides it [0.01]
	Slow     time.Duration `yaml:"slow" min:"0s"`                   // requests that take this long are traced though not sampled, as failed and migrated ones always are; 0: not [30s]
}

// Metrics has settings of /metrics.
type Metrics struct {
	LegacyNames      bool `yaml:"legacy_names"`      // also expose renamed metrics under their old names, for one release; see docs/upgrading.md [false]
	NativeHistograms bool `yaml:"native_histograms"` // in scrapes as protocol buffers, add native histograms to the classic ones of models; see docs/observability.md [false]
}

// Worker is one entry of workers, or of --engine/--prefill/--decode.
type Worker struct {
	ID           string              `yaml:"id"`
	URL          string              `yaml:"url"`
	Role         worker.Role         `yaml:"role"` // [aggregated]
	Models       []string            `yaml:"models"`
	Ranks        []uint16            `yaml:"ranks"`
	StartRank    int                 `yaml:"start_rank" min:"0" max:"65535"` // [read from the engine]
	RankURLs     []string            `yaml:"rank_urls"`
	Labels       []string            `yaml:"labels"`
	Engine       string              `yaml:"engine"`
	HealthPath   string              `yaml:"health_path"` // [health.path]
	BlockSize    int                 `yaml:"block_size" min:"0" max:"1048576"`
	KVEvents     []string            `yaml:"kv_events"` // ["auto"]
	KVReplay     []string            `yaml:"kv_replay"`
	LoadEvents   []string            `yaml:"load_events"` // [read from SGLang engines]
	MaxRequests  int64               `yaml:"max_requests" min:"0"`
	RankRequests int64               `yaml:"rank_requests" min:"0"` // [limits.rank_requests]
	RankTokens   int64               `yaml:"rank_tokens" min:"0"`   // [limits.rank_tokens]
	Options      map[string][]string `yaml:"options"`
}

// PD is prefill/decode disaggregation.
type PD struct {
	Family      string        `yaml:"family"`                          // protocol by which prefill hands over to decode: nixl, sglang, …, or off; an unknown name gives an error that lists all [nixl if there are prefill workers]
	Lease       time.Duration `yaml:"lease" min:"1s" max:"24h"`        // how long a prefill worker keeps the blocks of a request for decode [30s]
	LeaseMargin time.Duration `yaml:"lease_margin" min:"0s" max:"24h"` // the decode request is sent at most lease minus lease_margin after prefill's response [3s]
	// AbortDelay is the earliest abort of a decode request whose client disconnected, so that
	// the engine has admitted the request before. A stream is aborted this long after its
	// response headers, or at its first event. A request that is not streamed runs at least
	// this long, and until its engine has answered a later probe [500ms].
	AbortDelay time.Duration `yaml:"abort_delay" was:"cut_after" min:"0s"`
	// AbandonedDecodeTimeout is how long a decode request that is not streamed may finish after its
	// client disconnected, on vLLM 0.21 or later without Sluice's connector. If it is aborted,
	// its prefill engine logs "Potentially invalid KV blocks" and counts a notification after
	// expiry. Its blocks stay allocated until its engine has read them. 0 aborts it as soon as
	// abort_delay allows [10s].
	AbandonedDecodeTimeout time.Duration `yaml:"abandoned_decode_timeout" was:"abandoned_decode" min:"0s"`
	// CompletionTimeout is how long the router waits after prefill's response for the notification
	// that KV has been written (family lmcache), at most lease minus lease_margin. Then other
	// workers run the request, or the router refuses it (kv_not_written) if there is no other decode
	// worker. A prefill worker that repeatedly sends no notification gets no more requests.
	// 0 does not wait; use it if prefill workers set pd_skip_proxy_notification [5s].
	CompletionTimeout  time.Duration `yaml:"completion_timeout" was:"notify_wait" min:"0s"`
	MaxAttempts        int           `yaml:"max_attempts" min:"1" max:"16"`                       // prefill/decode pairs tried for one request; refused connections do not count [3]
	DecodeAttempts     int           `yaml:"decode_attempts" was:"decode_tries" min:"1" max:"16"` // decode workers tried with the same transfer handle, while no engine has received it [2]
	DecodeOnlyFallback bool          `yaml:"decode_only_fallback" was:"plain_decode"`             // if no prefill worker is available, a decode worker runs the whole request; false: the request waits for a prefill worker [true]
	// LocalPrefillTokens skips remote prefill if a decode worker has fewer prompt tokens than
	// this to compute [0: always remote].
	LocalPrefillTokens int `yaml:"local_prefill_tokens" min:"0"`
	// LocalWhenFaster skips remote prefill if a decode worker alone is expected to produce the
	// first token earlier, by both sides' queues and rates and the transfer time [false].
	LocalWhenFaster bool `yaml:"local_when_faster"`
	// PrefillByIDs sends prompts to vLLM 0.32 or later as token ids, so that the engine does not
	// render and tokenize them again: off, or verified: if the router has found the ids itself
	// (tokens.native) and the engine process has confirmed the ids of an earlier prompt of this API.
	// Other prompts are sent as text [off].
	PrefillByIDs  string   `yaml:"prefill_by_ids" oneof:"off verified"`
	PrefillLabels []string `yaml:"prefill_labels"` // only prefill workers with one of these labels are chosen [all]
	DecodeLabels  []string `yaml:"decode_labels"`  // only decode workers with one of these labels are chosen [all]
	// CacheHitThreshold is the fraction of a prompt, 0 to 1, that a decode worker must have in
	// its cache to run a request alone (family storage); 0: always prefill [0].
	CacheHitThreshold float64 `yaml:"cache_hit_threshold" min:"0" max:"1"`
	// ReasoningParser must be true if decode workers run a reasoning parser. It does not apply to
	// requests with token ids, so chat requests then run on one worker (family lmcache) [false].
	ReasoningParser bool `yaml:"reasoning_parser"`
}

// LMCache has settings of family lmcache that do not belong to one worker.
type LMCache struct {
	// ProxyHost is the address to which prefill workers send the notification that KV has been
	// written (their pd_proxy_host) [127.0.0.1].
	ProxyHost     string   `yaml:"proxy_host"`
	ProxyPort     int      `yaml:"proxy_port" min:"0" max:"65535"` // port of that address (pd_proxy_port of prefill workers); 0 selects a free port [8500]
	Networks      []string `yaml:"networks"`                       // CIDRs of prefill workers; connections from other addresses are closed [any]
	PeerHost      string   `yaml:"peer_host"`                      // host of the decode workers' peer ports, for workers without peer_host [the host of the URL]
	PeerInitPort  []string `yaml:"peer_init_port"`                 // peer-init ports of decode workers without init_port, one per tensor-parallel rank [none]
	PeerAllocPort []string `yaml:"peer_alloc_port"`                // peer-alloc ports of decode workers without alloc_port, one per tensor-parallel rank [none]
	// FinishedReqTTL is how long a notification that no request waits for is kept [300s].
	FinishedReqTTL  time.Duration `yaml:"finished_req_ttl" min:"1s" bare:"s"`
	CleanupInterval time.Duration `yaml:"cleanup_interval" min:"1s" bare:"s"` // interval of the removal of expired notifications [60s]
}

// Transfers has the tiers by which the router is notified of the outcome of KV transfers, best
// first: NIXL, UCX, ZMQ, and always the engines' HTTP responses. See docs/nixl.md.
type Transfers struct {
	// NIXL is the tier of the router's own NIXL agent: on, off, or auto. auto starts it if a
	// model hands over by NIXL, the library is found, and engines can learn its address (the
	// registration listener is on) or side_channel is on. It uses 30 MB of memory and two
	// threads. off does not load the library [auto].
	NIXL        string   `yaml:"nixl" oneof:"auto on off"`
	NIXLLibrary string   `yaml:"nixl_library"` // file or folder of libnixl_capi; if set, no other place is searched [searched as docs/nixl.md says]
	Python      []string `yaml:"python"`       // folders of the engines' Python environments; the NIXL in them is tried first [none]
	// UCX is the tier of active messages from the connector, for engines without NIXL: on, off,
	// or auto. auto starts it if a model hands over by NIXL, libucp is found, and engines can
	// learn its address (the registration listener is on). It uses 5 MB of memory in addition
	// to NIXL, and no CPU while idle [auto].
	UCX        string `yaml:"ucx" oneof:"auto on off"`
	UCXLibrary string `yaml:"ucx_library"` // file or folder of libucp; if set, no other place is searched [the one of NIXL, else searched as docs/nixl.md says]
	// UCXDevices are the network devices that UCX listens on [those with an address in registration.networks].
	UCXDevices []string `yaml:"ucx_devices"`
	UCXPorts   string   `yaml:"ucx_ports"` // TCP ports on which UCX listens, FROM-TO, at least one per device [any free ports]
	// Isolate runs the NIXL agent and the UCX agent each in a child process (this binary,
	// 50 MB each). A crash inside their libraries then stops the tier for a second instead of
	// the router [false].
	Isolate bool `yaml:"isolate"`
	// ZMQ is the tier of a PULL socket for the connector's reports: on, off, or auto. auto opens
	// it if zmq_listen is set, or if registration.listen is on and a model hands over by NIXL.
	// on opens it for every family and requires zmq_listen or registration.listen [auto].
	ZMQ             string   `yaml:"zmq" oneof:"auto on off"`
	ZMQListen       string   `yaml:"zmq_listen"`                                                // tcp://HOST:PORT of that socket [a free port of registration.listen's host]
	ZMQNetworks     []string `yaml:"zmq_networks"`                                              // CIDRs that may send reports; connections from other addresses are closed [registration.networks; any if registration.listen is off]
	CompletionSlots int      `yaml:"completion_slots" was:"board_slots" min:"64" max:"1048576"` // number of completion slots, each 64 bytes, that is, of concurrent transfers whose completion the connector can write; a multiple of 64 [16384]
	// StallTimeout is how long a decode request whose engine runs the connector may have
	// neither a report of its transfer nor a response; then prefill and decode run again.
	// 0 waits as long as timeouts.decode [0].
	StallTimeout time.Duration `yaml:"stall_timeout" min:"0s"`
	// SideChannel is what the router sends over NIXL to prefill engines that run vLLM (0.22 to
	// 0.33) without Sluice's connector: renew (renews the lease of a request between its legs),
	// release (also releases the blocks of abandoned requests), or off [off].
	SideChannel string `yaml:"side_channel" oneof:"off renew release"`
}

// Model overrides settings for one model.
type Model struct {
	PD            *PD           `yaml:"pd"`                                        // prefill/decode disaggregation of this model, instead of pd
	TTFT          time.Duration `yaml:"ttft" min:"0s"`                             // target of the first token, instead of the class's; 0: the class's [0s]
	TPOT          time.Duration `yaml:"tpot" min:"0s"`                             // target of the time per output token, instead of the class's; 0: the class's [0s]
	Deadline      time.Duration `yaml:"deadline" min:"0s"`                         // time after which a request ends, instead of the class's; 0: the class's [0s]
	Tokenizer     string        `yaml:"tokenizer"`                                 // folder with the model's tokenizer.json, tokenizer_config.json and chat template, so that the router finds token ids itself; see docs/tokens.md [none: an engine finds them]
	ContentFormat string        `yaml:"content_format" oneof:"auto string openai"` // vLLM's --chat-template-content-format, for tokenizer [auto]
	ChatTemplate  string        `yaml:"chat_template"`                             // file with the template that the engines were started with (vLLM's --chat-template), for tokenizer [none: the folder's own]
	// ChatTemplateKwargs is vLLM's --default-chat-template-kwargs, for tokenizer: a JSON object of
	// variables of the template, such as '{"enable_thinking": false}' [none].
	ChatTemplateKwargs string `yaml:"chat_template_kwargs"`
	// TrustRequestChatTemplate is vLLM's --trust-request-chat-template, for tokenizer: the engines tokenize
	// the prompts of requests with a template of their own. Without it engines refuse such requests [false].
	TrustRequestChatTemplate bool `yaml:"trust_request_chat_template"`
	// ExcludeTools is vLLM's --exclude-tools-when-tool-choice-none, for tokenizer: the engines do not
	// render the tools of requests with tool_choice none [false].
	ExcludeTools bool `yaml:"exclude_tools_when_tool_choice_none"`
}

// Admission holds requests in the router while no rank can start them soon, and decides their
// order; see docs/admission.md.
type Admission struct {
	// Mode is fair (classes, tenants and targets decide the order), fifo (the order of arrival), or
	// off (every request is sent to an engine at once) [fair].
	Mode string `yaml:"mode" oneof:"fair fifo off"`
	// EngineQueue is the work, in expected time, that may be queued on a rank before its engine has
	// started it: enough to keep it busy until the next request arrives. A request that would find
	// more waits in the router [200ms].
	EngineQueue time.Duration `yaml:"engine_queue" min:"1ms" max:"10m"`
	// AffinityWait is how long a request may wait for a full rank that holds its prefix, where that
	// costs less than computing it on another rank that could start it [500ms].
	AffinityWait time.Duration `yaml:"affinity_wait" min:"0s" max:"10m"`
	MaxRequests  int           `yaml:"max_requests" min:"1" max:"1000000"` // requests that wait; 429 beyond [50000]
	MaxBytes     int64         `yaml:"max_bytes" unit:"bytes" min:"0"`     // bodies of the requests that wait; 429 beyond; 0: half of limits.memory_budget [0]
	MaxWait      time.Duration `yaml:"max_wait" min:"1ms" max:"24h"`       // longest wait of a request; then 429 [30s]
	MaxTenants   int           `yaml:"max_tenants" min:"1" max:"1000000"`  // tenants of waiting requests that have a turn of their own; further ones share one [1024]
	MinShare     float64       `yaml:"min_share" min:"0" max:"0.5"`        // share of the tokens, and of the space in a full queue, that the lowest class gets at least while it has waiting requests [0.05]
	UnmetTarget  string        `yaml:"unmet_target" oneof:"refuse late"`   // what becomes of a request whose target or deadline cannot be met by the forecast: refuse (429 with Retry-After) or late (it waits behind those of its tenant that can be met) [refuse]
	TenantHeader string        `yaml:"tenant_header"`                      // request header in which trusted clients name the tenant, as x-llm-d-inference-fairness-id does; it is not forwarded if it is the default [X-Sluice-Tenant]
	// Trusted are the clients that may name a tenant and ask for any class by header or by the body's
	// priority: networks (10.0.0.0/8), unix (callers of engine_api.unix_socket), any, or off. Others may
	// ask for the classes of their API key [unix].
	Trusted []string `yaml:"trusted"`
	// Preemption lets a request that no rank can start suspend streams of lower classes that could
	// migrate: they wait in the queue and go on where they stopped. It needs two classes, mode fair and
	// migration.max_attempts above 0; see docs/admission.md [false].
	Preemption         bool          `yaml:"preemption"`
	MaxPreemptions     int           `yaml:"max_preemptions" min:"1" max:"1000"`     // how often a stream may be suspended [3]
	PreemptionInterval time.Duration `yaml:"preemption_interval" min:"0s" max:"24h"` // how long a stream that was suspended runs before it may be suspended again [10s]
	// DefaultClass is the class of requests that nothing assigns to another [the first class].
	DefaultClass string           `yaml:"default_class"`
	Classes      []AdmissionClass `yaml:"classes"` // priority classes, the highest first; see docs/admission.md [one class, default]
}

// AdmissionClass is one priority class.
type AdmissionClass struct {
	Name        string        `yaml:"name"`                           // name in headers, logs and metrics
	Models      []string      `yaml:"models"`                         // models whose requests have this class unless they may ask for another [none]
	Priorities  []string      `yaml:"priorities"`                     // values of the body's priority that ask for this class: numbers (5) and ranges (-10..-1) [none]
	MinShare    float64       `yaml:"min_share" min:"0" max:"0.5"`    // share of the tokens, and of the space in a full queue, that the class gets at least while it has waiting requests; for the lowest class 0 means admission.min_share [0]
	MaxRequests int           `yaml:"max_requests" min:"0"`           // requests of this class that wait; 0: admission.max_requests [0]
	MaxBytes    int64         `yaml:"max_bytes" unit:"bytes" min:"0"` // bodies of this class that wait; 0: admission.max_bytes [0]
	MaxWait     time.Duration `yaml:"max_wait" min:"0s" max:"24h"`    // longest wait of a request; 0: admission.max_wait [0s]
	TTFT        time.Duration `yaml:"ttft" min:"0s"`                  // target of the first token for requests that state none; 0: no target [0s]
	TPOT        time.Duration `yaml:"tpot" min:"0s"`                  // target of the time per output token for requests that state none; 0: no target [0s]
	Deadline    time.Duration `yaml:"deadline" min:"0s"`              // time after which a request that states no deadline ends; 0: none [0s]
	UnmetTarget string        `yaml:"unmet_target"`                   // refuse or late, instead of admission.unmet_target [that of admission]
}

// Limits bound requests and connections.
type Limits struct {
	MaxBody       int64 `yaml:"max_body" unit:"bytes" min:"1KiB"`                        // largest request body; 413 beyond; at most a quarter of memory_budget [32MiB]
	MemoryBudget  int64 `yaml:"memory_budget" was:"body_budget" unit:"bytes" min:"1KiB"` // memory of all bodies together; 503 beyond; at least four times max_body [1GiB]
	MaxHead       int   `yaml:"max_head" unit:"bytes" min:"1KiB" max:"1MiB"`             // largest request head; 431 beyond [16KiB]
	MaxDepth      int   `yaml:"max_depth" min:"4" max:"1024"`                            // nesting of objects and arrays in a body, at most 1024 [64]
	MaxConns      int   `yaml:"max_conns" min:"1"`                                       // client connections [100000]
	MaxConnsPerIP int   `yaml:"max_conns_per_ip" min:"0"`                                // client connections from one address; for clients behind proxies.forwarded, requests in flight; 0: no limit [0]
	EngineConns   int   `yaml:"engine_conns" min:"1"`                                    // connections open to one engine [4096]
	PoolWaiters   int   `yaml:"pool_waiters" min:"0"`                                    // requests that wait for a healthy worker; 503 beyond; 0: no limit [1000]
	RankRequests  int64 `yaml:"rank_requests" min:"0"`                                   // requests in flight on one rank; requests wait while all eligible ranks are full, and get 429 in the end or if admission.mode is off; 0: no limit [0]
	RankTokens    int64 `yaml:"rank_tokens" min:"0"`                                     // prompt tokens to be computed on one rank, as this router counts them; requests wait while all eligible ranks are full, and get 429 in the end or if admission.mode is off; 0: no limit [0]
}

// Compression of responses with zstd or gzip, whichever the client's Accept-Encoding prefers.
// Requests in either are always accepted; limits.max_body bounds their decompressed size.
type Compression struct {
	MinBytes int `yaml:"min_bytes" unit:"bytes" min:"0" max:"1GiB"` // smallest response that is compressed, streams excluded; above 1 MiB or without a length only JSON is, at most 32 responses at once; 0: no response is compressed [2KiB]
	// Streams compresses streams too, and flushes each event. A stream then has at most a
	// quarter of the bytes, runs on a goroutine, and costs about 10 µs of CPU per event [false].
	Streams bool `yaml:"streams"`
}

// Timeouts of legs and waits.
type Timeouts struct {
	Head       time.Duration `yaml:"head" min:"1ms"`                // longest time to read a request head [10s]
	Body       time.Duration `yaml:"body" min:"1ms"`                // longest time to read a body, plus its size at 256 KiB/s [30s]
	BodyIdle   time.Duration `yaml:"body_idle" min:"1ms"`           // longest pause between bytes of a body (over TLS up to a quarter more); then 408 [15s]
	KeepAlive  time.Duration `yaml:"keep_alive" min:"1ms"`          // how long an idle client connection stays open [75s]
	Write      time.Duration `yaml:"write" min:"1ms"`               // longest time of one flush to a client [30s]
	Connect    time.Duration `yaml:"connect" min:"1ms"`             // longest time to connect to an engine [2s]
	EngineIdle time.Duration `yaml:"engine_idle" min:"1ms"`         // how long an idle connection to an engine stays open; less than the engine's own timeout, which is 5s for uvicorn [4s]
	EngineAge  time.Duration `yaml:"engine_age" min:"0s"`           // maximum age of a pooled engine connection, ±12.5 % jitter; a new connection resolves the name again; 0: unlimited [1h]
	Prefill    time.Duration `yaml:"prefill" min:"1ms"`             // longest time of a prefill leg [300s]
	Decode     time.Duration `yaml:"decode" min:"1ms"`              // longest time of a decode or whole leg [600s]
	FirstByte  time.Duration `yaml:"first_byte" min:"1ms"`          // longest time from the last byte of a streamed decode or whole request to its response head; then another worker is tried [300s]
	StreamIdle time.Duration `yaml:"stream_idle" min:"1ms"`         // longest time between two reads of a stream from an engine [120s]
	PoolWait   time.Duration `yaml:"pool_wait" min:"0s"`            // how long a request waits for a healthy worker, at its arrival and before retries; then 503 [5s]
	DrainDelay time.Duration `yaml:"drain_delay" min:"0s"`          // after SIGTERM, how long the router still accepts connections while /readyz answers 503, so that load balancers see it; 0: at most 1s, while there are requests [0s]
	Restart    time.Duration `yaml:"restart" min:"100ms" max:"10m"` // how long a hot restart waits for the new process to be ready; then the old one continues [60s]
	Drain      time.Duration `yaml:"drain" min:"0s"`                // how long streams may continue after SIGTERM [30s]
}

// Relay has settings of streams: when their response head is sent, and what relays them; see
// docs/relay.md.
type Relay struct {
	// EarlyHeadersAfter is when a stream's response headers are sent at the latest, counted from the
	// request to an engine; 0: at once. A later failure is an error event in a response of
	// status 200, and headers that name workers are missing. -1 or "off": the headers are sent
	// when the engine's arrive [off].
	EarlyHeadersAfter time.Duration `yaml:"early_headers_after" was:"head_after" min:"0s" off:"true"`
	// CommentInterval is the interval of comments to a client whose stream has begun and that waits
	// for the engine's first byte, so that load balancers do not close the connection; 10ms or
	// more; 0: none [0s].
	CommentInterval time.Duration `yaml:"comment_interval" was:"keep_alive" min:"0s"`

	Driver  string `yaml:"driver" oneof:"loop goroutine"` // loop (event loops over epoll; goroutines where the kernel refuses them) or goroutine (one for each stream) [loop]
	Threads int    `yaml:"threads" min:"0" max:"256"`     // event loops; 0: one for each CPU [0]
}

// Migration of streams whose engine fails; see docs/migration.md.
type Migration struct {
	MaxAttempts int      `yaml:"max_attempts" was:"max" min:"0" max:"8"` // how often one stream may continue on another engine after its own failed; 0: never [1]
	Tokens      string   `yaml:"tokens" oneof:"auto client"`             // source of a stream's token ids: auto (the router requests them from engines that support it, and removes them), client (only streams whose client requested them) [auto]
	Allow       []string `yaml:"allow"`                                  // requests that may migrate although the result can differ: in text (stop, penalties, bad_words, seed, retokenized), in log-probabilities by noise (logprobs), or because n choices continue as prompts of one request (multiple_choices) [none]

	// Structured is how a stream migrates whose output a grammar constrains (response_format,
	// guided_*, structured_outputs). error: it does not, and ends with an error event. exact: it
	// migrates if the rest of the grammar can be expressed, which holds for a choice among texts.
	// unconstrained: in other cases it migrates without the grammar, so its output may violate
	// it [error].
	Structured string `yaml:"structured" oneof:"error exact unconstrained"`

	HandoverTokens  int           `yaml:"handover_tokens" min:"0"`                                 // a stream that migrates in a pool with prefill workers runs prefill and decode again if the decode worker would have to compute at least this many tokens; 0: always [4096]
	DrainDelay      time.Duration `yaml:"drain_delay" was:"drain_after" min:"0s" off:"true"`       // streams of a worker that drains or was removed migrate after this time; -1 or "off": never [10s]
	TokenizeTimeout time.Duration `yaml:"tokenize_timeout" was:"tokenize_wait" min:"1ms" max:"1m"` // timeout of an engine's tokenizer, if the text of a stream must be tokenized again [2s]
}

// MigrationAllow lists the words of migration.allow.
var MigrationAllow = []string{"stop", "penalties", "bad_words", "seed", "retokenized", "logprobs", "multiple_choices"}

// EngineAPI is the router as an engine, for callers that tokenize themselves; see
// docs/engine-api.md. It is off until one of http, unix_socket and listen is set.
type EngineAPI struct {
	HTTP       bool   `yaml:"http"`                   // serve POST /v1/engine/generate [false]
	UnixSocket string `yaml:"unix_socket" was:"unix"` // path of the framed socket; the file's permissions decide who may connect [none]
	Listen     string `yaml:"listen"`                 // TCP address of the framed socket, or "off" [off]
	Token      string `yaml:"token" secret:"true"`    // token that callers of the socket must send, 16 characters or more; never logged [none]

	// RequireAPIKeys are the callers that must send an API key if there are api_keys: all, or tcp (callers
	// of the unix socket need none) [all].
	RequireAPIKeys string `yaml:"require_api_keys" was:"keys" oneof:"all tcp"`

	TLSCert string `yaml:"tls_cert"` // PEM file with the TCP socket's certificate; read again when it changes [plain TCP]
	TLSKey  string `yaml:"tls_key"`  // PEM file with its key [none]
	// VLLMDialect is the API that the router uses for vLLM workers: completions
	// (/v1/completions with return_token_ids), generate (/inference/v1/generate,
	// which does not detokenize), or auto: generate if all workers of a model have
	// it (0.20) and the P/D family supports it, else completions [auto].
	VLLMDialect  string   `yaml:"vllm_dialect" was:"vllm" oneof:"auto completions generate"`
	AllowedHosts []string `yaml:"allowed_hosts" was:"hosts"` // networks, addresses and names that a caller's prefill_result and bootstrap_info may name; a network includes loopback and link-local addresses only if it lies within their ranges [none]

	MinWorkers   int           `yaml:"min_workers" min:"0" max:"4096"`          // the socket opens when this many workers are ready, of any role [1]
	StartTimeout time.Duration `yaml:"start_timeout" was:"start_wait" min:"0s"` // the socket opens after this time with fewer workers [60s]

	MaxConns   int           `yaml:"max_conns" min:"1"`                            // connections of the socket [256]
	MaxStreams int           `yaml:"max_streams" min:"1" max:"1000000"`            // requests in flight on one connection [16384]
	MaxFrame   int64         `yaml:"max_frame" unit:"bytes" min:"4KiB" max:"1GiB"` // largest request; at most a quarter of limits.memory_budget [8MiB]
	Heartbeat  time.Duration `yaml:"heartbeat" min:"100ms"`                        // idle time before a ping; after three times this the connection is closed [15s]
}

// Health of workers.
type Health struct {
	Interval           time.Duration `yaml:"interval" min:"10ms"`                                     // interval of probes of a worker with requests; with more than 64 workers, idle ones are probed less often, and a worker that is down is detected within 5s [500ms]
	Timeout            time.Duration `yaml:"timeout" min:"1ms"`                                       // timeout of one probe; at least 3s until the engine is known, because SGLang's /health takes over 1s [1s]
	Path               string        `yaml:"path"`                                                    // path of probes, such as /healthz; a worker's health_path overrides it [the first of /health, /ping and /v1/models that the engine has; for SGLang the first of /ready and /ping]
	UnhealthyThreshold int           `yaml:"unhealthy_threshold" was:"fail_after" min:"1" max:"1000"` // consecutive failures after which a worker is unhealthy [2]
	MetricsInterval    time.Duration `yaml:"metrics_interval" was:"scrape" min:"10ms" off:"true"`     // interval of reading an engine's /metrics; longer with more than 64 workers, at most 15s; -1 or "off": never [1s]
	BreakerFailures    int           `yaml:"breaker_failures" was:"break_after" min:"1" max:"1000"`   // consecutive failures (connection failures, 500, 502, 504; never a 4xx) that open the breaker of one rank [5]
	BreakerOpenTime    time.Duration `yaml:"breaker_open_time" was:"break_for" min:"10ms" max:"30s"`  // how long an open breaker excludes the rank; doubles each time, at most 30s [1s]
	FrozenProcess      time.Duration `yaml:"frozen_process" min:"100ms" off:"true"`                   // an engine that accepts connections is frozen after this time without a sign of life (probe, byte, KV event, counter); its requests are ended and run elsewhere; -1 or "off": never [10s]
	FrozenCore         time.Duration `yaml:"frozen_core" min:"100ms" off:"true"`                      // the same for an engine whose API server answers while no request on it makes progress; three times the expected time of its longest prompt is added [30s]
	FrozenHost         time.Duration `yaml:"frozen_host" min:"100ms" off:"true"`                      // the same for an engine to which no connection can be opened; refused connections do not count [10s]
	// ProbeInference sends a one-token request to a worker before its admission [false].
	ProbeInference bool `yaml:"probe_inference"`
}

// Fleet has settings that concern all workers together.
type Fleet struct {
	MinWorkers              int           `yaml:"min_workers" min:"0" max:"4096"`                             // at the start, /readyz waits for this many ready workers, of any role [0]
	StartTimeout            time.Duration `yaml:"start_timeout" was:"start_wait" min:"0s"`                    // longest wait for min_workers [60s]
	RetryBudgetRatio        float64       `yaml:"retry_budget_ratio" was:"retry_share" min:"0" max:"1"`       // retries per request of a pool, so that retries do not amplify an overload [0.2]
	RetryBudgetMinPerSecond float64       `yaml:"retry_budget_min_per_second" was:"retry_per_second" min:"0"` // retries per second of a pool in addition [3]
}

// Discovery has sources of workers in addition to this configuration.
type Discovery struct {
	File             string        `yaml:"file"`                                          // a YAML file that contains only workers; read again when it changes [none]
	FilePollInterval time.Duration `yaml:"file_poll_interval" was:"file_poll" min:"10ms"` // interval of checks of that file, and of the configuration's own for its workers [1s]
	DNS              []DNS         `yaml:"dns"`                                           // DNS names that are looked up periodically; see docs/discovery.md [none]
}

// DNS is one name whose addresses are workers.
type DNS struct {
	Name        string        `yaml:"name"`                                          // DNS name, used without search domains
	Type        string        `yaml:"type" oneof:"a srv"`                            // a (A and AAAA records) or srv (SRV records)
	Role        worker.Role   `yaml:"role"`                                          // role of every worker that is found
	Port        int           `yaml:"port" min:"0" max:"65535"`                      // port of the engines, for type a
	Scheme      string        `yaml:"scheme" oneof:"http https"`                     // scheme of the engines [http]
	Server      string        `yaml:"server"`                                        // HOST:PORT of a DNS server [those of /etc/resolv.conf]
	MinInterval time.Duration `yaml:"min_interval" was:"least" min:"100ms"`          // shortest time between two queries; otherwise the answer's TTL
	MaxInterval time.Duration `yaml:"max_interval" was:"most" min:"100ms" max:"24h"` // longest time between two queries
	Worker      *Worker       `yaml:"worker"`                                        // other settings of every worker that is found
}

// Kube finds pods by label.
type Kube struct {
	Selector      string   `yaml:"selector"`                  // label selector of pods that are workers, such as app in (prefill,decode); empty: pods are not discovered [empty]
	Namespace     string   `yaml:"namespace"`                 // namespace of the pods; "*" for all [the router's own]
	Kubeconfig    string   `yaml:"kubeconfig"`                // kubeconfig file [none: the pod's service account]
	RoleLabel     string   `yaml:"role_label"`                // label whose value is the role [app]
	PrefillValues []string `yaml:"prefill"`                   // values of role_label that mean a prefill worker [prefill]
	DecodeValues  []string `yaml:"decode"`                    // values that mean a decode worker; any other is aggregated [decode]
	ModelLabel    string   `yaml:"model_label"`               // label whose value is the model's name [read from the engine]
	Port          string   `yaml:"port"`                      // port of the engine's HTTP server, by number or by the name of a container's port [8000]
	Scheme        string   `yaml:"scheme" oneof:"http https"` // scheme of that server [http]
	Worker        *Worker  `yaml:"worker"`                    // other settings of every worker that is found: engine, ranks, labels, kv_events, options [nothing]
}

// Registration is the listener where workers register themselves.
type Registration struct {
	Listen     string        `yaml:"listen"`                         // address of the registration listener, or "off" [off]
	Token      string        `yaml:"token" secret:"true"`            // token that workers must send, 16 characters or more; never logged [none]
	TLSCert    string        `yaml:"tls_cert"`                       // PEM file with the listener's certificate [plain HTTP]
	TLSKey     string        `yaml:"tls_key"`                        // PEM file with its key [none]
	ClientCA   string        `yaml:"client_ca"`                      // PEM file with the CAs of worker certificates; instead of a token, or with one [none]
	Networks   []string      `yaml:"networks"`                       // CIDRs (by flag: --set registration.networks=10.0.0.0/16,fd00::/8) that must contain the caller and every address that a worker announces; a network includes loopback and link-local addresses only if it lies within their ranges [loopback, if the listener is there]
	Lease      time.Duration `yaml:"lease" min:"1s" max:"10m"`       // a worker without a renewal for this time is removed, unless it requests another lease [15s]
	MaxLease   time.Duration `yaml:"max_lease" min:"1s" max:"24h"`   // longest lease that a worker may request [5m]
	MaxWorkers int           `yaml:"max_workers" min:"1" max:"4096"` // maximum number of registered workers [1024]
}

// Tokens is the source of token ids.
type Tokens struct {
	Mode           string        `yaml:"mode" oneof:"auto engine text ids"`     // source of token ids if the request has none: auto (the engine, else text), engine, text, ids [auto]
	CacheBytes     int64         `yaml:"cache_bytes" unit:"bytes" min:"0"`      // memory of the cache of tokenized prompts [64MiB]
	Timeout        time.Duration `yaml:"timeout" min:"1ms"`                     // timeout of one call to an engine's /tokenize, then text mode; also of one call of the tokenizer library, then the engine is asked [250ms]
	Native         string        `yaml:"native" oneof:"off configured auto"`    // models whose prompts the tokenizer library tokenizes, if it is installed: those with models.NAME.tokenizer (configured), also those whose vLLM engine reports a folder that the router can read (auto), or none (off) [configured]
	VerifyRatio    float64       `yaml:"verify_ratio" min:"0" max:"1"`          // share of natively tokenized prompts that are compared with the engine's ids in the background, besides the first of each API with each engine; 0: only those [0.01]
	MaxEngineBytes int64         `yaml:"max_engine_bytes" unit:"bytes" min:"0"` // largest body that is sent to /tokenize; text mode beyond [1MiB]
}

// Index has the size and the snapshots of the KV index.
type Index struct {
	MaxBytes int64 `yaml:"max_bytes" unit:"bytes" min:"1MiB"` // memory of the KV index [1GiB]
	// Snapshot is a file to which the router writes the index periodically and at a clean
	// exit, and which it reads at the start, so that it knows engines' cached blocks at once;
	// empty: none [empty].
	Snapshot         string        `yaml:"snapshot"`
	SnapshotInterval time.Duration `yaml:"snapshot_interval" min:"1s"` // time between two snapshots [5m]
	ApproxTTL        time.Duration `yaml:"approx_ttl" min:"1s"`        // how long the blocks of a request are predicted to stay in a cache, for engines without KV events [2m]
}

// Recording writes every event, choice and outcome to files, for sluice replay.
type Recording struct {
	Dir      string `yaml:"dir"`                               // folder of recordings, created with mode 0700; they contain block hashes, never text or tokens; empty: none [empty]
	MaxFile  int64  `yaml:"max_file" unit:"bytes" min:"1MiB"`  // approximate size of one file [64MiB]
	MaxTotal int64  `yaml:"max_total" unit:"bytes" min:"2MiB"` // size of all recordings in dir; the oldest are deleted first [1GiB]
}

// Schedule has the weights of the cost of a candidate; see package schedule for the formula.
type Schedule struct {
	OverlapWeight  float64 `yaml:"overlap_weight" min:"0"`                                    // weight of cached tokens: 1 subtracts them fully from the prompt [1]
	PrefillWeight  float64 `yaml:"prefill_weight" min:"0"`                                    // weight of the remaining prefill work [1]
	DecodeWeight   float64 `yaml:"decode_weight" min:"0"`                                     // weight of the decode blocks in use and reserved [1]
	QueueWeight    float64 `yaml:"queue_weight" min:"0"`                                      // weight of the queued load [1]
	HostWeight     float64 `yaml:"host_weight" min:"0" max:"1"`                               // value of a token cached in the engine's host memory, relative to one on the device [0.8]
	DiskWeight     float64 `yaml:"disk_weight" min:"0" max:"1"`                               // the same for a token cached on disk [0.5]
	InFlightWeight float64 `yaml:"in_flight_weight" was:"awaited_weight" min:"0" max:"1"`     // the same for a token that was sent to the worker and has no KV event yet; 0 ignores them [0.9]
	EvictionWeight float64 `yaml:"eviction_weight" min:"0" max:"1"`                           // value of a cached token that new blocks displace and that is expected to be asked for again, relative to one that is computed; 0 ignores what is displaced [0.5]
	OthersWeight   float64 `yaml:"others_weight" min:"0"`                                     // what other requests pay for a token that is computed, relative to what its own request pays, while ranks are busy; an eighth of it applies while they are mostly idle. A higher value keeps prompts with what is cached, and queues them longer for it [4]
	PrefillMS      float64 `yaml:"prefill_ms" min:"0" max:"1000"`                             // ms to compute one prompt token; 0: learned from each worker [0]
	TransferMS     float64 `yaml:"transfer_ms" min:"0" max:"1000"`                            // ms to pull one prompt token's KV from a prefill worker; 0: learned [0]
	BlockMS        float64 `yaml:"block_ms" min:"0" max:"1000"`                               // ms that a resident KV block of the batch adds to the decode of a request; 0: learned [0]
	Temperature    float64 `yaml:"temperature" min:"0"`                                       // 0 selects the lowest cost; a higher value spreads choices around it [0]
	Explain        int     `yaml:"explain" min:"0" max:"10000000"`                            // number of decisions kept for sluice explain [10000]
	Policy         string  `yaml:"policy" oneof:"kv round_robin random least_loaded session"` // kv, or for comparisons round_robin, random, least_loaded or session [kv]
}

// Sessions are what requests belong to that continue one context: an agent's run, a chat. See
// docs/sessions.md.
type Sessions struct {
	Max        int           `yaml:"max" min:"1" max:"10000000"` // number of sessions that the router remembers; beyond it, those of the client with the most are forgotten [65536]
	Expire     time.Duration `yaml:"expire" min:"1s"`            // a session is forgotten when it was not used for this long [30m]
	UserMember bool          `yaml:"user_member"`                // the member user of a request's body names its session, if nothing else does; set it where each value is one conversation [false]
	// LimitActive limits how many sessions of a model are active while sessions lose their KV to
	// each other between their turns: an active one keeps its place for hold, and the next turns of
	// the others wait in the admission queue [false].
	LimitActive bool          `yaml:"limit_active"`
	Hold        time.Duration `yaml:"hold" min:"100ms"`    // the longest time for which a session stays active after a turn; it is six times its usual pause, a tenth of this at least [30s]
	MaxWait     time.Duration `yaml:"max_wait" min:"10ms"` // how long a turn waits in the admission queue for a place, at most half of its class's max_wait; then it waits for a rank alone [30s]
}

// Steering has the headers by which clients may influence scheduling.
type Steering struct {
	Pinning []string `yaml:"pinning" was:"pins"` // clients that may select workers by X-Sluice-Worker and X-Sluice-Allowed-Workers: networks (10.0.0.0/8), unix (callers of engine_api.unix_socket), any, or off [unix]
	// PrefillOnly is what makes a request prefill-only, so that its prompt is computed and
	// cached without generation: any (X-Sluice-Prefill-Only: true, or max_tokens: 0), header (only
	// the header; a max_tokens of 0 is passed to the engine), or off [header].
	PrefillOnly string `yaml:"prefill_only" oneof:"any header off"`
}
