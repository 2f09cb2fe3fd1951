package app

import (
	"sluice/dataplane/upstream"
	"sluice/router/config"
	"sluice/router/fleet"
	"sluice/router/liveness"
	"sluice/router/pd"
	"sluice/router/schedule"
	"sluice/router/session"
	"sluice/router/tokenize"
)

// The functions of this file convert a configuration to the options of each part of a router,
// for the start and for reloads. See front.go for the options of the front.

func scheduleOptions(cfg *config.Config) schedule.Options {
	s := &cfg.Schedule
	return schedule.Options{
		OverlapWeight: s.OverlapWeight, PrefillWeight: s.PrefillWeight, DecodeWeight: s.DecodeWeight, QueueWeight: s.QueueWeight,
		HostWeight: s.HostWeight, DiskWeight: s.DiskWeight, InFlightWeight: s.InFlightWeight, EvictionWeight: s.EvictionWeight, OthersWeight: s.OthersWeight,
		Rates:       schedule.Rates{Prefill: s.PrefillMS, Transfer: s.TransferMS, Block: s.BlockMS},
		Temperature: s.Temperature, Policy: s.Policy, Explain: s.Explain,
	}
}

func fleetOptions(cfg *config.Config) fleet.Options {
	return fleet.Options{
		Upstream:                upstream.Options{MaxConns: cfg.Limits.EngineConns, ConnectTimeout: cfg.Timeouts.Connect, IdleTimeout: cfg.Timeouts.EngineIdle, MaxAge: cfg.Timeouts.EngineAge, Key: cfg.EngineKey},
		ProbeInterval:           cfg.Health.Interval,
		ProbeTimeout:            cfg.Health.Timeout,
		HealthPath:              cfg.Health.Path,
		UnhealthyThreshold:      cfg.Health.UnhealthyThreshold,
		ScrapeInterval:          cfg.Health.MetricsInterval,
		ProbeInference:          cfg.Health.ProbeInference,
		BreakerThreshold:        cfg.Health.BreakerFailures,
		BreakerTimeout:          cfg.Health.BreakerOpenTime,
		Frozen:                  liveness.Bounds{Process: cfg.Health.FrozenProcess, Core: cfg.Health.FrozenCore, Host: cfg.Health.FrozenHost},
		MaxRequests:             cfg.Limits.RankRequests,
		MaxTokens:               cfg.Limits.RankTokens,
		RetryBudgetRatio:        zeroMeansNone(cfg.Fleet.RetryBudgetRatio),
		RetryBudgetMinPerSecond: zeroMeansNone(cfg.Fleet.RetryBudgetMinPerSecond),
	}
}

func tokenOptions(cfg *config.Config) tokenize.Options {
	c := &cfg.Tokens
	opt := tokenize.Options{Mode: c.Mode, CacheBytes: c.CacheBytes, Timeout: c.Timeout, MaxEngineBytes: int(c.MaxEngineBytes), VerifyRatio: zeroMeansNone(c.VerifyRatio)}
	if opt.CacheBytes == 0 {
		opt.CacheBytes = -1 // no cache; 0 would select the default size
	}
	return opt
}

// zeroMeansNone converts a configured 0 to the -1 that means none in the fleet's options,
// where 0 selects the default.
func zeroMeansNone(v float64) float64 {
	if v == 0 {
		return -1
	}
	return v
}

func runnerOptions(cfg *config.Config) pd.Options {
	return pd.Options{
		PD: cfg.PD, Models: cfg.Models, Timeouts: cfg.Timeouts, Steering: cfg.Steering, Migration: cfg.Migration,
		Sessions: session.Options{
			Max: cfg.Sessions.Max, Expire: cfg.Sessions.Expire, UserMember: cfg.Sessions.UserMember, LimitActive: cfg.Sessions.LimitActive,
			Hold: cfg.Sessions.Hold, MaxWait: cfg.Sessions.MaxWait,
		},
		PoolWaiters: cfg.Limits.PoolWaiters, TransferStall: cfg.Transfers.StallTimeout,
		Admission: cfg.Admission, AdmissionBytes: cfg.WaitingBytes(),
	}
}
