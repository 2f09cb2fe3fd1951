package engineapi

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"sluice/bench/sim"
	"sluice/bench/testwait"
	"sluice/dataplane/wire"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// dialWith is harness.DialEngine with options. It returns the error of a refused connection.
func dialWith(t *testing.T, r *harness.Router, network string, opt client.Options) (*client.Client, error) {
	t.Helper()
	addr := ""
	testwait.UntilWithin(t, harness.TestTimeout, "the engine socket is open", func() bool { addr = harness.WireAddr(r, network); return addr != "" })
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	c, err := client.Dial(ctx, addr, opt)
	if err == nil {
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

func mustDialWith(t *testing.T, r *harness.Router, network string, opt client.Options) *client.Client {
	t.Helper()
	c, err := dialWith(t, r, network, opt)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func unauthorized(err error) bool {
	var e *wire.Error
	return errors.As(err, &e) && e.Code == wire.CodeUnauthorize
}

// TestEngineAPIKeys: if API keys are configured, callers of the socket must present one, and the
// key's limits apply to each request.
func TestEngineAPIKeys(t *testing.T) {
	e := harness.StartSim(t, nil)
	whole, narrow, few := apikey.New(), apikey.New(), apikey.New()
	keys := []config.APIKey{
		{Name: "whole", SHA256: apikey.HashOf(whole).String()},
		{Name: "narrow", SHA256: apikey.HashOf(narrow).String(), Models: []string{"sim"}},
		{Name: "few", SHA256: apikey.HashOf(few).String(), RequestsPerMinute: 2},
	}
	for _, principal := range []string{"all", "tcp"} {
		t.Run(principal, func(t *testing.T) {
			r := harness.StartRouter(t, func(c *config.Config) {
				harness.WithEngineAPI(harness.SocketIn(t))(c)
				harness.WithKeys(keys...)(c)
				c.EngineAPI.Token, c.EngineAPI.RequireAPIKeys = "the-socket's-own-token", principal
			}, harness.SimWorker(e, worker.Aggregated, "e0"))
			with := func(key string) client.Options { return client.Options{Token: r.Config.EngineAPI.Token, Key: key} }
			for _, network := range []string{"unix", "tcp"} {
				_, err := dialWith(t, r, network, with(""))
				if free := principal == "tcp" && network == "unix"; free && err != nil || !free && !unauthorized(err) {
					t.Errorf("%s, no key: %v", network, err)
				}
				for _, bad := range []client.Options{with(whole + "x"), {Token: whole}, {Key: whole}} {
					if _, err := dialWith(t, r, network, bad); !unauthorized(err) || strings.Contains(err.Error(), whole) {
						t.Errorf("%s, %d bytes of key and %d of token: %v", network, len(bad.Key), len(bad.Token), err)
					}
				}
				c := mustDialWith(t, r, network, with(whole))
				if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 1), 10)); a.Failure != nil || len(a.Tokens[0]) != 10 {
					t.Errorf("%s, a good key: %v %v", network, a.Failure, a.Err)
				}
			}
			if n := r.Metric(`sluice_api_key_tokens_total{key="whole"}`); n != 100 {
				t.Errorf("%v tokens are booked to the key; want 100: two times 40 of a prompt and 10 of an answer", n)
			}

			c := mustDialWith(t, r, "tcp", with(narrow))
			if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 2), 3)); a.Failure != nil {
				t.Errorf("a model that the key is good for: %v", a.Failure)
			}
			other := harness.EngineAPIRequest(harness.TokenIDs(40, 2), 3)
			other.Model = "other"
			adapter := harness.EngineAPIRequest(harness.TokenIDs(40, 2), 3)
			adapter.Routing = map[string]any{"lora_name": "other"}
			for _, req := range []*client.Request{other, adapter} {
				if a := harness.GenerateEngineAPI(t, c, req); a.Failure == nil || a.Failure.Code != 403 || a.Failure.Param != "model" || !strings.Contains(a.Failure.Message, `"other"`) {
					t.Errorf("a model that the key is not good for: %+v", a.Failure)
				}
			}
			body := `{"model":"sim","token_ids":[1,2,3],"routing":{"lora_name":"other"},"stop_conditions":{"max_tokens":3}}`
			if a := harness.Post(t, r.URL+"/v1/engine/generate", body, "Authorization", "Bearer "+narrow); a.Status != 403 {
				t.Errorf("the same over HTTP: %d %s", a.Status, a.Body)
			}

			c = mustDialWith(t, r, "tcp", with(few))
			for i := range 3 {
				a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 3), 3))
				if i < 2 && a.Failure != nil || i == 2 && (a.Failure == nil || a.Failure.Code != 429 || a.Failure.Type != "rate_limit_error") {
					t.Errorf("request %d of two a minute: %v", i+1, a.Failure)
				}
			}

			// A key that was removed from the configuration is invalid on open connections too.
			c = mustDialWith(t, r, "tcp", with(narrow))
			hash, err := apikey.ParseHash(keys[0].SHA256)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Keyring.Replace([]apikey.Spec{{Name: keys[0].Name, Hash: hash}}); err != nil {
				t.Fatal(err)
			}
			if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 4), 3)); a.Failure == nil || a.Failure.Code != 401 || a.Err != nil {
				t.Errorf("a key that was taken out: %v, %v", a.Failure, a.Err)
			}
			for _, secret := range []string{whole, narrow, few, r.Config.EngineAPI.Token} {
				if strings.Contains(r.Logs.String(), secret) {
					t.Error("a secret is in the log")
				}
			}
			for _, seen := range harness.GenerateRequests(e) {
				if seen.Header("Authorization") != "" || strings.Contains(string(seen.Body), whole) {
					t.Errorf("the engine was shown %q", seen.Header("Authorization"))
				}
			}
		})
	}
}

// TestEngineAPICertificateReload: the router reads the socket's certificate again when its files
// change; running streams continue.
func TestEngineAPICertificateReload(t *testing.T) {
	t.Parallel()
	e := harness.StartSim(t, nil)
	dir := t.TempDir()
	cert, key := harness.WriteCert(t, dir)
	r := harness.StartRouter(t, func(c *config.Config) {
		harness.WithEngineAPI("")(c)
		c.EngineAPI.TLSCert, c.EngineAPI.TLSKey = cert, key
	}, harness.SimWorker(e, worker.Aggregated, "e0"))
	trusting := func() client.Options {
		pem, err := os.ReadFile(cert)
		if err != nil {
			t.Fatal(err)
		}
		roots := x509.NewCertPool()
		roots.AppendCertsFromPEM(pem)
		return client.Options{TLS: &tls.Config{RootCAs: roots, ServerName: "127.0.0.1"}}
	}
	old := trusting()
	e.Fault(sim.Fault{Kind: sim.Slow, Delay: 5 * time.Millisecond})
	c := mustDialWith(t, r, "tcp", old)
	s := harness.StartEngineAPI(t, c, harness.EngineAPIRequest(harness.TokenIDs(40, 1), 50_000))
	firstTokens(t, s)
	expires := r.Metric("sluice_engine_api_certificate_expiry_timestamp_seconds")
	if expires < float64(time.Now().Unix()) {
		t.Errorf("the certificate is said to end at %v", expires)
	}
	harness.WriteCert(t, dir)
	testwait.UntilWithin(t, harness.TestTimeout, "the new certificate is shown", func() bool {
		c, err := dialWith(t, r, "tcp", trusting())
		if err == nil {
			c.Close()
		}
		return err == nil
	})
	if _, err := dialWith(t, r, "tcp", old); err == nil {
		t.Error("who trusts the old certificate alone was let in")
	}
	firstTokens(t, s)
	s.Stop()
	ctx, cancel := context.WithTimeout(context.Background(), harness.TestTimeout)
	defer cancel()
	if a := harness.ReadEngineAPI(ctx, s); a.Err != nil || a.Failure != nil || a.Finish[0] != "cancelled" {
		t.Errorf("the stream that was in progress: %v %v %q", a.Err, a.Failure, a.Finish[0])
	}
}
