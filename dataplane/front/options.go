package front

import (
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// Changeable returns a copy of o with only the options that Server.Change can change; all
// others are zero.
func (o Options) Changeable() Options {
	var only Options
	o.copyChangeable(&only)
	return only
}

// copyChangeable copies the options that may change while a Server runs to at.
func (o Options) copyChangeable(at *Options) {
	at.MaxBodyBytes, at.MaxDepth, at.StripForbidden, at.MediaHosts = o.MaxBodyBytes, o.MaxDepth, o.StripForbidden, o.MediaHosts
	at.BodyBudgetBytes, at.HeadTimeout, at.IdleTimeout = o.BodyBudgetBytes, o.HeadTimeout, o.IdleTimeout
	at.BodyIdleTimeout = o.BodyIdleTimeout
	at.BodyTimeout, at.WriteTimeout, at.StreamIdleTimeout = o.BodyTimeout, o.WriteTimeout, o.StreamIdleTimeout
	at.MaxConns, at.MaxConnsPerIP = o.MaxConns, o.MaxConnsPerIP
	at.CompressMin, at.CompressStreams = o.CompressMin, o.CompressStreams
	at.EarlyHeaders, at.EarlyHeadersAfter, at.KeepAlive = o.EarlyHeaders, o.EarlyHeadersAfter, o.KeepAlive
	at.CORS, at.Proxies = o.CORS, o.Proxies
}

// withDefaults returns o with defaults in place of zero values. It fails on invalid options.
func (o Options) withDefaults() (Options, error) {
	if o.Handler == nil {
		return o, errors.New("front: cannot make a server without a Handler")
	}
	o.WithholdClientKeys = o.WithholdClientKeys || o.Authenticator != nil
	if err := o.Proxies.check(); err != nil {
		return o, err
	}
	if o.CORS != nil {
		cors := o.CORS.withJoined()
		o.CORS = &cors
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	switch o.RelayMode {
	case "":
		o.RelayMode = RelayLoop
	case RelayLoop, RelayGoroutine:
	default:
		return o, fmt.Errorf("front: cannot use Relay %q: want loop or goroutine", o.RelayMode)
	}
	sizes := []struct {
		name     string
		at       *int64
		def, min int64
	}{
		{"MaxBodyBytes", &o.MaxBodyBytes, 32 << 20, 1},
		{"BodyBudgetBytes", &o.BodyBudgetBytes, 1 << 30, 1},
	}
	for _, f := range sizes {
		if *f.at == 0 {
			*f.at = f.def
		}
		if *f.at < f.min {
			return o, fmt.Errorf("front: cannot use %s %d: want %d or more", f.name, *f.at, f.min)
		}
	}
	// A buffer that grows is counted together with the one it replaces. Each counts with its
	// size class, which is up to twice the body.
	if o.BodyBudgetBytes/4 < o.MaxBodyBytes {
		return o, fmt.Errorf("front: cannot use BodyBudgetBytes %d: want at least four times MaxBodyBytes, %d", o.BodyBudgetBytes, o.MaxBodyBytes)
	}
	counts := []struct {
		name     string
		at       *int
		def, min int
	}{
		{"MaxHeadBytes", &o.MaxHeadBytes, 16 << 10, 512},
		{"MaxDepth", &o.MaxDepth, 64, 1},
		{"MaxConns", &o.MaxConns, 100_000, 1},
		{"MaxConnsPerIP", &o.MaxConnsPerIP, 0, 0},
		{"CompressMin", &o.CompressMin, 0, 0},
	}
	for _, f := range counts {
		if *f.at == 0 {
			*f.at = f.def
		}
		if *f.at < f.min {
			return o, fmt.Errorf("front: cannot use %s %d: want %d or more", f.name, *f.at, f.min)
		}
	}
	if o.drainTime == 0 {
		o.drainTime = drainTime
	}
	times := []struct {
		name string
		at   *time.Duration
		def  time.Duration
	}{
		{"HeadTimeout", &o.HeadTimeout, 10 * time.Second},
		{"BodyTimeout", &o.BodyTimeout, 30 * time.Second},
		{"BodyIdleTimeout", &o.BodyIdleTimeout, 15 * time.Second},
		{"IdleTimeout", &o.IdleTimeout, 75 * time.Second},
		{"WriteTimeout", &o.WriteTimeout, 30 * time.Second},
		{"StreamIdleTimeout", &o.StreamIdleTimeout, 0},
		{"EarlyHeadAfter", &o.EarlyHeadersAfter, 0},
		{"KeepAlive", &o.KeepAlive, 0},
	}
	for _, f := range times {
		if *f.at == 0 {
			*f.at = f.def
		}
		if *f.at < 0 {
			return o, fmt.Errorf("front: cannot use %s %v: want a positive duration", f.name, *f.at)
		}
	}
	return o, nil
}
