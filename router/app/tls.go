package app

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"time"

	"sluice/dataplane/certs"
	"sluice/dataplane/upstream"
	"sluice/router/config"
)

func clientFiles(cfg *config.Config) certs.Files {
	return certs.Files{Cert: cfg.TLS.Cert, Key: cfg.TLS.Key, CA: cfg.TLS.ClientCA}
}

func engineFiles(cfg *config.Config) certs.Files {
	return certs.Files{Cert: cfg.EngineTLS.Cert, Key: cfg.EngineTLS.Key, CA: cfg.EngineTLS.CA}
}

func engineAPIFiles(cfg *config.Config) certs.Files {
	return certs.Files{Cert: cfg.EngineAPI.TLSCert, Key: cfg.EngineAPI.TLSKey}
}

// clientTLS returns the TLS configuration of the client listener; nil for plain HTTP.
func (r *Router) clientTLS() (*tls.Config, error) {
	c := r.cfg.TLS
	if c.Cert == "" {
		return nil, nil
	}
	k, err := certs.New(clientFiles(r.cfg), r.log)
	if err != nil {
		return nil, fmt.Errorf("tls: %w", err)
	}
	r.metrics.GaugeFunc(func() float64 { return float64(k.NotAfter().UnixMilli()) / 1000 }, "sluice_certificate_expiry_timestamp_seconds")
	if left := time.Until(k.NotAfter()); left < 0 {
		r.log.Warn("the certificate has expired", "file", c.Cert, "expires", k.NotAfter())
	}
	least := uint16(tls.VersionTLS12)
	if c.MinVersion == "1.3" {
		least = tls.VersionTLS13
	}
	return k.ServerConfig(least)
}

// engineTLS returns a function from an engine's host name to the TLS configuration of
// connections to it; nil if the configuration sets no certificate, so that Go's defaults apply.
func engineTLS(cfg *config.Config, log *slog.Logger) (func(serverName string) *tls.Config, error) {
	c := cfg.EngineTLS
	if c.CA == "" && c.Cert == "" {
		return nil, nil
	}
	k, err := certs.New(engineFiles(cfg), log)
	if err != nil {
		return nil, fmt.Errorf("engine_tls: %w", err)
	}
	return k.ClientConfig, nil
}

// EngineOptions returns the options for connections to the engines of cfg: its engine_key and
// engine_tls, and the given connect timeout.
func EngineOptions(cfg *config.Config, connect time.Duration) (upstream.Options, error) {
	to, err := engineTLS(cfg, nil)
	return upstream.Options{ConnectTimeout: connect, Key: cfg.EngineKey, TLS: to}, err
}
