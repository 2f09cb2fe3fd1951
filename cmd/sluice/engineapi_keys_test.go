package main

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
	"sluice/dataplane/wire"
	"sluice/router/apikey"
	"sluice/router/config"
	"sluice/router/engineapi/client"
	"sluice/router/worker"
)

// dialWith is dialEngine with options, of which the connection may be refused.
func dialWith(t *testing.T, r *testRouter, network string, opt client.Options) (*client.Client, error) {
	t.Helper()
	addr := ""
	eventually(t, testTimeout, "the engine socket is open", func() bool { addr = wireAddr(r, network); return addr != "" })
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	c, err := client.Dial(ctx, addr, opt)
	if err == nil {
		t.Cleanup(func() { c.Close() })
	}
	return c, err
}

func mustDialWith(t *testing.T, r *testRouter, network string, opt client.Options) *client.Client {
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

// TestEngineAPIKeys: where there are API keys, callers of the socket show one, and what it
// may do holds for each request.
func TestEngineAPIKeys(t *testing.T) {
	e := startSim(t, nil)
	whole, narrow, few := apikey.New(), apikey.New(), apikey.New()
	keys := []config.APIKey{
		{Name: "whole", SHA256: apikey.HashOf(whole).String()},
		{Name: "narrow", SHA256: apikey.HashOf(narrow).String(), Models: []string{"sim"}},
		{Name: "few", SHA256: apikey.HashOf(few).String(), RequestsPerMinute: 2},
	}
	for _, principal := range []string{"all", "tcp"} {
		t.Run(principal, func(t *testing.T) {
			r := startRouter(t, func(c *config.Config) {
				withEngineAPI(socketIn(t))(c)
				withKeys(keys...)(c)
				c.EngineAPI.Token, c.EngineAPI.Keys = "the-socket's-own-token", principal
			}, simWorker(e, worker.Aggregated, "e0"))
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
				if a := generateEngineAPI(t, c, engineAPIRequest(tokenIDs(40, 1), 10)); a.failure != nil || len(a.tokens[0]) != 10 {
					t.Errorf("%s, a good key: %v %v", network, a.failure, a.err)
				}
			}
			if n := r.metric(`sluice_api_key_tokens_total{key="whole"}`); n != 100 {
				t.Errorf("%v tokens are booked to the key; want 100: two times 40 of a prompt and 10 of an answer", n)
			}

			c := mustDialWith(t, r, "tcp", with(narrow))
			if a := generateEngineAPI(t, c, engineAPIRequest(tokenIDs(40, 2), 3)); a.failure != nil {
				t.Errorf("a model that the key is good for: %v", a.failure)
			}
			other := engineAPIRequest(tokenIDs(40, 2), 3)
			other.Model = "other"
			adapter := engineAPIRequest(tokenIDs(40, 2), 3)
			adapter.Routing = map[string]any{"lora_name": "other"}
			for _, req := range []*client.Request{other, adapter} {
				if a := generateEngineAPI(t, c, req); a.failure == nil || a.failure.Code != 403 || a.failure.Param != "model" || !strings.Contains(a.failure.Message, `"other"`) {
					t.Errorf("a model that the key is not good for: %+v", a.failure)
				}
			}
			body := `{"model":"sim","token_ids":[1,2,3],"routing":{"lora_name":"other"},"stop_conditions":{"max_tokens":3}}`
			if a := post(t, r.URL+"/v1/routed/generate", body, "Authorization", "Bearer "+narrow); a.Status != 403 {
				t.Errorf("the same over HTTP: %d %s", a.Status, a.Body)
			}

			c = mustDialWith(t, r, "tcp", with(few))
			for i := range 3 {
				a := generateEngineAPI(t, c, engineAPIRequest(tokenIDs(40, 3), 3))
				if i < 2 && a.failure != nil || i == 2 && (a.failure == nil || a.failure.Code != 429 || a.failure.Type != "rate_limit_error") {
					t.Errorf("request %d of two a minute: %v", i+1, a.failure)
				}
			}

			// A key that is taken out is good no longer, on connections that are open either.
			c = mustDialWith(t, r, "tcp", with(narrow))
			hash, err := apikey.ParseHash(keys[0].SHA256)
			if err != nil {
				t.Fatal(err)
			}
			if err := r.Keyring.Replace([]apikey.Spec{{Name: keys[0].Name, Hash: hash}}); err != nil {
				t.Fatal(err)
			}
			if a := generateEngineAPI(t, c, engineAPIRequest(tokenIDs(40, 4), 3)); a.failure == nil || a.failure.Code != 401 || a.err != nil {
				t.Errorf("a key that was taken out: %v, %v", a.failure, a.err)
			}
			for _, secret := range []string{whole, narrow, few, r.Config.EngineAPI.Token} {
				if strings.Contains(r.logs.String(), secret) {
					t.Error("a secret is in the log")
				}
			}
			for _, seen := range generateRequests(e) {
				if seen.Header("Authorization") != "" || strings.Contains(string(seen.Body), whole) {
					t.Errorf("the engine was shown %q", seen.Header("Authorization"))
				}
			}
		})
	}
}

// TestEngineAPICertificateReload: the socket's certificate is read again when its files
// change; a stream under way goes on.
func TestEngineAPICertificateReload(t *testing.T) {
	e := startSim(t, nil)
	dir := t.TempDir()
	cert, key := writeCert(t, dir)
	r := startRouter(t, func(c *config.Config) {
		withEngineAPI("")(c)
		c.EngineAPI.TLSCert, c.EngineAPI.TLSKey = cert, key
	}, simWorker(e, worker.Aggregated, "e0"))
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
	s := startEngineAPI(t, c, engineAPIRequest(tokenIDs(40, 1), 50_000))
	firstTokens(t, s)
	expires := r.metric("sluice_engine_api_certificate_expiry_timestamp_seconds")
	if expires < float64(time.Now().Unix()) {
		t.Errorf("the certificate is said to end at %v", expires)
	}
	writeCert(t, dir)
	eventually(t, testTimeout, "the new certificate is shown", func() bool {
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
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	if a := readEngineAPI(ctx, s); a.err != nil || a.failure != nil || a.finish[0] != "cancelled" {
		t.Errorf("the stream that was under way: %v %v %q", a.err, a.failure, a.finish[0])
	}
}
