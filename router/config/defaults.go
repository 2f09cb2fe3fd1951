package config

import "time"

// Default is the configuration of a router without any settings.
func Default() *Config {
	const kib, mib, gib = 1 << 10, 1 << 20, 1 << 30
	return &Config{
		Listen: "127.0.0.1:8080",
		TLS:    TLS{MinVersion: "1.2"},
		Admin:  Admin{Listen: "127.0.0.1:9901", Timelines: 1000},
		Log:    Log{Level: "info", Format: "text"},

		Proxies: Proxies{Protocol: "off", Forwarded: "off"},
		CORS:    CORS{MaxAge: 10 * time.Minute},

		AccessLog: AccessLog{Output: "off", Sample: 1, MaxFile: 100 * mib, MaxFiles: 5},
		Tracing:   Tracing{Protocol: "auto", Sample: 0.01, Slow: 30 * time.Second},
		PD: PD{
			Family: "off", Lease: 30 * time.Second, LeaseMargin: 3 * time.Second, AbortDelay: 500 * time.Millisecond, AbandonedDecodeTimeout: 10 * time.Second,
			CompletionTimeout: 5 * time.Second, MaxAttempts: 3, DecodeAttempts: 2, DecodeOnlyFallback: true, PrefillByIDs: "off",
		},
		LMCache: LMCache{
			ProxyHost: "127.0.0.1", ProxyPort: 8500, FinishedReqTTL: 300 * time.Second, CleanupInterval: 60 * time.Second,
		},
		Transfers: Transfers{NIXL: "auto", UCX: "auto", ZMQ: "auto", CompletionSlots: 16384, SideChannel: "off"},
		Limits: Limits{
			MaxBody: 32 * mib, MemoryBudget: gib, MaxHead: 16 * kib, MaxDepth: 64, MaxConns: 100_000, EngineConns: 4096, PoolWaiters: 1000,
		},
		Admission: Admission{
			Mode: "fair", EngineQueue: 200 * time.Millisecond, AffinityWait: 500 * time.Millisecond, MaxRequests: 50_000, MaxWait: 30 * time.Second,
			MaxTenants: 1024, MinShare: 0.05, MaxPreemptions: 3, PreemptionInterval: 10 * time.Second, UnmetTarget: "refuse", TenantHeader: "X-Sluice-Tenant", Trusted: []string{"unix"},
		},
		Compression: Compression{MinBytes: 2 * kib},
		Timeouts: Timeouts{
			Head: 10 * time.Second, Body: 30 * time.Second, BodyIdle: 15 * time.Second, KeepAlive: 75 * time.Second, Write: 30 * time.Second,
			Connect: 2 * time.Second, EngineIdle: 4 * time.Second, EngineAge: time.Hour, Prefill: 300 * time.Second, Decode: 600 * time.Second,
			FirstByte: 300 * time.Second, StreamIdle: 120 * time.Second, PoolWait: 5 * time.Second, Drain: 30 * time.Second, Restart: 60 * time.Second,
		},
		Relay:     Relay{EarlyHeadersAfter: -1, Driver: "loop"},
		Migration: Migration{MaxAttempts: 1, Tokens: "auto", Structured: "error", HandoverTokens: 4096, DrainDelay: 10 * time.Second, TokenizeTimeout: 2 * time.Second},
		Health:    Health{Interval: 500 * time.Millisecond, Timeout: time.Second, UnhealthyThreshold: 2, MetricsInterval: time.Second, BreakerFailures: 5, BreakerOpenTime: time.Second, FrozenProcess: 10 * time.Second, FrozenCore: 30 * time.Second, FrozenHost: 10 * time.Second},
		Tokens:    Tokens{Mode: "auto", CacheBytes: 64 * mib, Timeout: 250 * time.Millisecond, MaxEngineBytes: mib, Native: "configured", VerifyRatio: 0.01},
		Index:     Index{MaxBytes: gib, ApproxTTL: 2 * time.Minute, SnapshotInterval: 5 * time.Minute},
		Schedule:  Schedule{OverlapWeight: 1, PrefillWeight: 1, DecodeWeight: 1, QueueWeight: 1, HostWeight: 0.8, DiskWeight: 0.5, InFlightWeight: 0.9, EvictionWeight: 0.5, OthersWeight: 4, Explain: 10_000, Policy: "kv"},
		Steering:  Steering{Pinning: []string{"unix"}, PrefillOnly: "header"},
		Sessions:  Sessions{Max: 1 << 16, Expire: 30 * time.Minute, Hold: 30 * time.Second, MaxWait: 30 * time.Second},
		Recording: Recording{MaxFile: 64 * mib, MaxTotal: gib},

		EngineAPI: EngineAPI{Listen: "off", RequireAPIKeys: "all", VLLMDialect: "auto", MinWorkers: 1, StartTimeout: 60 * time.Second, MaxConns: 256, MaxStreams: 16384, MaxFrame: 8 * mib, Heartbeat: 15 * time.Second},

		Fleet:        Fleet{StartTimeout: 60 * time.Second, RetryBudgetRatio: 0.2, RetryBudgetMinPerSecond: 3},
		Discovery:    Discovery{FilePollInterval: time.Second},
		Kube:         Kube{RoleLabel: "app", PrefillValues: []string{"prefill"}, DecodeValues: []string{"decode"}, Port: "8000", Scheme: "http"},
		Registration: Registration{Listen: "off", Lease: 15 * time.Second, MaxLease: 5 * time.Minute, MaxWorkers: 1024},

		origins: map[string]origin{},
	}
}
