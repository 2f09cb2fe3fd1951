package access

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/worker"
)

// TestBadInputErrorNamesField: each invalid request receives an error that names the field, and no
// engine receives the request.
func TestBadInputErrorNamesField(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.Limits.MaxBody = 4096 }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	chatPath := "/v1/chat/completions"
	for _, k := range []struct {
		name, path, body string
		status           int
		reason           string
		says             []string // texts in the message or the param
	}{
		{"cut short", chatPath, `{"model":"sim","messages":[`, 400, "bad_json", nil},
		{"no JSON", chatPath, `hello`, 400, "bad_json", nil},
		{"empty", chatPath, ``, 400, "bad_json", nil},
		{"not an object", chatPath, `[1]`, 400, "", []string{"object"}},
		{"trailing bytes", chatPath, `{"model":"sim","messages":[]} x`, 400, "bad_json", nil},
		{"invalid UTF-8", chatPath, "{\"model\":\"sim\",\"messages\":[{\"role\":\"user\",\"content\":\"\xff\xfe\"}]}", 400, "bad_json", nil},
		{"model a number", chatPath, `{"model":5,"messages":[]}`, 400, "bad_field", []string{"model"}},
		{"stream a string", chatPath, `{"model":"sim","messages":[],"stream":"yes"}`, 400, "bad_field", []string{"stream"}},
		{"messages a string", chatPath, `{"model":"sim","messages":"hi"}`, 400, "bad_field", []string{"messages", "array"}},
		{"max_tokens a string", chatPath, `{"model":"sim","messages":[],"max_tokens":"12"}`, 400, "bad_field", []string{"max_tokens"}},
		{"two models", chatPath, `{"model":"sim","model":"sim","messages":[]}`, 400, "bad_field", []string{"model"}},
		{"two streams", chatPath, `{"model":"sim","stream":true,"messages":[],"stream":false}`, 400, "bad_field", []string{"stream"}},
		{"two models by escapes", chatPath, `{"model":"sim","m\u006fdel":"other","messages":[]}`, 400, "bad_field", []string{"model"}},
		{"too large", chatPath, `{"model":"sim","messages":[],"x":"` + strings.Repeat("y", 5000) + `"}`, 413, "body_too_large", []string{"4096"}},
		{"too deep", chatPath, `{"model":"sim","messages":[],"x":` + strings.Repeat("[", 100) + strings.Repeat("]", 100) + `}`, 400, "bad_json", []string{"64"}},
		{"kv_transfer_params", chatPath, `{"model":"sim","messages":[],"kv_transfer_params":{"do_remote_prefill":true}}`, 400, "forbidden_field", []string{"kv_transfer_params"}},
		{"kv_transfer_params by escapes", chatPath, `{"model":"sim","messages":[],"kv_transfer\u005fparams":{}}`, 400, "forbidden_field", []string{"kv_transfer_params"}},
		{"bootstrap_host", chatPath, `{"model":"sim","messages":[],"bootstrap_host":"10.0.0.1"}`, 400, "forbidden_field", []string{"bootstrap_host"}},
		{"bootstrap_port", "/v1/completions", `{"model":"sim","prompt":"x","bootstrap_port":1}`, 400, "forbidden_field", []string{"bootstrap_port"}},
		{"bootstrap_room", "/v1/completions", `{"model":"sim","prompt":"x","bootstrap_room":[1]}`, 400, "forbidden_field", []string{"bootstrap_room"}},
		{"disagg_prefill_resp", chatPath, `{"model":"sim","messages":[],"disagg_prefill_resp":{}}`, 400, "forbidden_field", []string{"disagg_prefill_resp"}},
		{"disaggregated_params", chatPath, `{"model":"sim","messages":[],"disaggregated_params":{}}`, 400, "forbidden_field", []string{"disaggregated_params"}},
		{"forbidden on embeddings", "/v1/embeddings", `{"model":"sim","input":"x","kv_transfer_params":{}}`, 400, "forbidden_field", []string{"kv_transfer_params"}},
		{"unknown path", "/v1/chat/completion", `{}`, 404, "unknown_route", []string{"/v1/chat/completions"}},
		{"unknown model", chatPath, `{"model":"gpt","messages":[]}`, 404, "unknown_model", []string{"gpt", "sim"}},
	} {
		for _, pathAndShape := range []string{k.path, "/v1/messages"} {
			if pathAndShape != k.path && (k.path != chatPath || k.status == 404) {
				continue
			}
			a := harness.Post(t, r.URL+pathAndShape, k.body, "X-Request-Id", "bad")
			harness.WantReason(t, a, k.status, cmpOr(k.reason, a.Header.Get("X-Sluice-Reason")))
			if a.Header.Get("X-Sluice-Reason") == "" || a.Header.Get("X-Request-Id") != "bad" || a.Header.Get("Content-Type") != "application/json" {
				t.Errorf("%s: headers %v", k.name, a.Header)
			}
			text := errorShape(t, pathAndShape, a)
			for _, want := range k.says {
				if !strings.Contains(text, want) {
					t.Errorf("%s: the error does not say %q: %s", k.name, want, a.Body)
				}
			}
		}
	}
	if n := len(harness.GenerateRequests(p)) + len(harness.GenerateRequests(d)); n != 0 {
		t.Errorf("the engines were sent %d requests", n)
	}
	// The router still serves, and no load remains reserved.
	harness.WantStatus(t, harness.Post(t, r.URL+chatPath, harness.Chat("")), 200)
	harness.WantIdle(t, r, 10e9, p, d)
}

func cmpOr(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// errorShape checks the error object of the path's API format and returns its message.
func errorShape(t *testing.T, path string, a *harness.Answer) string {
	t.Helper()
	if path != "/v1/messages" {
		msg, typ, param := a.ErrorOf(t)
		if typ == "" {
			t.Errorf("no type in %s", a.Body)
		}
		return msg + " " + param
	}
	var v struct {
		Type  string
		Error struct{ Type, Message string }
	}
	if err := json.Unmarshal(a.Body, &v); err != nil || v.Type != "error" || v.Error.Type == "" || v.Error.Message == "" {
		t.Errorf("no error of Anthropic's shape: %s", a.Body)
	}
	return v.Error.Message
}

func TestWrongMethodAndType(t *testing.T) {
	e := harness.StartSim(t, nil)
	r := harness.StartRouter(t, nil, harness.SimWorker(e, worker.Aggregated, "w0"))
	do := func(method, path, contentType string) *harness.Answer {
		req, _ := http.NewRequest(method, r.URL+path, strings.NewReader(harness.Chat("")))
		req.Header.Set("Content-Type", contentType)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		return &harness.Answer{Status: resp.StatusCode, Header: resp.Header, Body: b}
	}
	for _, method := range []string{"GET", "PUT", "DELETE"} {
		a := do(method, "/v1/chat/completions", "application/json")
		harness.WantReason(t, a, 405, "wrong_method")
		if a.Header.Get("Allow") != "POST" {
			t.Errorf("Allow %q", a.Header.Get("Allow"))
		}
	}
	harness.WantReason(t, do("POST", "/readyz", "application/json"), 405, "wrong_method")
	harness.WantReason(t, do("POST", "/v1/chat/completions", "text/plain"), 415, "wrong_content_type")
	harness.WantStatus(t, do("POST", "/v1/chat/completions", "application/json; charset=utf-8"), 200)
}

// TestForbiddenFieldsAreStripped: if configured, the router removes forbidden fields, and no engine
// receives them.
func TestForbiddenFieldsAreStripped(t *testing.T) {
	p, d := harness.StartSim(t, harness.SimRole("prefill")), harness.StartSim(t, harness.SimRole("decode"))
	r := harness.StartRouter(t, func(c *config.Config) { c.StripForbidden = true }, harness.SimWorker(p, worker.Prefill, "p0"), harness.SimWorker(d, worker.Decode, "d0"))
	for i, extra := range []string{
		`"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[],"remote_host":"evil"}`,
		`"bootstrap_host":"evil","bootstrap_port":1,"bootstrap_room":2`,
		`"disagg_prefill_resp":{"evil":1}`, `"disaggregated_params":{"evil":1}`, `"kv_transfer\u005fparams":{"remote_host":"evil"}`,
	} {
		body := fmt.Sprintf(`{%s,"model":"sim","messages":[{"role":"user","content":"%d"}],"max_tokens":4,%s}`, extra, i, `"seed":1`)
		a := harness.Post(t, r.URL+"/v1/chat/completions", body)
		if a.Status != 200 || a.Header.Get("X-Sluice-Prefill-Worker") != "p0" {
			t.Errorf("%s: status %d: %s", extra, a.Status, a.Body)
		}
	}
	for _, rec := range append(p.Requests(), d.Requests()...) {
		if strings.Contains(string(rec.Body), "evil") || strings.Contains(string(rec.Body), "bootstrap") {
			t.Errorf("%s saw %s", rec.Path, rec.Body)
		}
	}
	if !d.Alive() || d.Stats().Sum().IncompleteHandles != 0 {
		t.Error("decode was given an incomplete handle")
	}
}

// TestEngineAnswersGarbage: if an engine does not answer with HTTP, the client receives a 502 that
// says so. A 200 with an unexpected body is forwarded.
func TestEngineAnswersGarbage(t *testing.T) {
	for name, k := range map[string]struct {
		bytes  string
		status int
		reason string
	}{
		"no HTTP":             {"SSH-2.0-OpenSSH_9.2\r\n\r\n", 502, "upstream_invalid_response"},
		"two lengths":         {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc", 502, "upstream_invalid_response"},
		"length and chunks":   {"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 502, "upstream_invalid_response"},
		"nothing":             {"", 502, "upstream_failed"},
		"a body that is less": {"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", 502, "upstream_failed"},
		"elsewhere":           {"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/\r\nSet-Cookie: a=b\r\nContent-Length: 0\r\n\r\n", 502, "upstream_invalid_response"},
		"no JSON":             {"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello", 200, ""},
		"a head without end":  {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 100<<10), 502, "upstream_invalid_response"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := harness.StartScripted(t, func(w http.ResponseWriter, _ *http.Request) { harness.ReplyRaw(w, k.bytes, false) })
			r := harness.StartRouter(t, nil, e.Worker(worker.Aggregated, "w0"))
			for _, path := range []string{"/v1/chat/completions", "/v1/messages"} {
				a := harness.Post(t, r.URL+path, harness.Chat(""), "X-Request-Id", "garbage")
				harness.WantReason(t, a, k.status, k.reason)
				if a.Header.Get("Location") != "" || a.Header.Get("Set-Cookie") != "" {
					t.Errorf("the client is sent elsewhere: %v", a.Header)
				}
				if k.status == 502 {
					if text := errorShape(t, path, a); !strings.Contains(text, "w0") {
						t.Errorf("the error does not say which worker: %s", text)
					}
				}
			}
			if b := r.ReservedLoad(); b != "" {
				t.Error(b)
			}
		})
	}
}

// TestForbiddenFieldsInside: vLLM also reads its own parameters from the extra arguments, so the
// router forbids them there too.
func TestForbiddenFieldsInside(t *testing.T) {
	e := harness.StartSim(t, nil)
	for _, strip := range []bool{false, true} {
		r := harness.StartRouter(t, func(c *config.Config) { c.StripForbidden = strip }, harness.SimWorker(e, worker.Aggregated, "w0"))
		for _, c := range []struct{ path, body, field string }{
			{"/inference/v1/generate", `{"model":"sim","token_ids":[300],"sampling_params":{"max_tokens":1,"extra_args":{"a":1,"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"10.0.0.9"}}}}`, "sampling_params.extra_args.kv_transfer_params"},
			{"/inference/v1/generate", `{"model":"sim","token_ids":[300],"sampling_params":{"extra_args":{"kv_transfer_params":null,"kv\u005ftransfer_params":{}}}}`, "sampling_params.extra_args.kv_transfer_params"},
			{"/v1/chat/completions", `{"model":"sim","messages":[],"vllm_xargs":{"ec_transfer_params":{"remote_host":"10.0.0.9"}}}`, "vllm_xargs.ec_transfer_params"},
		} {
			before := len(e.Requests())
			a := harness.Post(t, r.URL+c.path, c.body)
			if a.Status != 400 {
				t.Fatalf("strip %v: %s: status %d, want 400: %s", strip, c.body, a.Status, a.Body)
			}
			if _, _, param := a.ErrorOf(t); param != c.field || a.Header.Get("X-Sluice-Reason") != "forbidden_field" {
				t.Errorf("strip %v: param %q, reason %q; want %q, forbidden_field", strip, param, a.Header.Get("X-Sluice-Reason"), c.field)
			}
			for _, rec := range e.Requests()[before:] {
				if rec.Method == "POST" {
					t.Errorf("the engine saw %s %s", rec.Path, rec.Body)
				}
			}
		}
		if a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(`,"vllm_xargs":{"kv_transfer_params":null,"own":1}`)); a.Status != 200 {
			t.Errorf("harmless vllm_xargs: status %d: %s", a.Status, a.Body)
		}
	}
}

// TestOverrideHeadersAreDropped: SGLang reads the bootstrap address from headers, which only the
// router may set. The router drops these headers of a client.
func TestOverrideHeadersAreDropped(t *testing.T) {
	engine := func(role string) *sim.Engine {
		return harness.StartSim(t, func(o *sim.Options) { o.Engine, o.Role, o.HeaderOverrides = "sglang", role, true })
	}
	p, d := engine("prefill"), engine("decode")
	prefill := harness.SimWorker(p, worker.Prefill, "p0")
	harness.WithBootstrap(&prefill, p)
	r := harness.StartRouter(t, harness.SGLangPD, prefill, harness.SimWorker(d, worker.Decode, "d0"))
	a := harness.Post(t, r.URL+"/v1/chat/completions", harness.Chat(""), "X-Override-Bootstrap-Host", "127.9.9.9", "x-override-bootstrap-port", "9", "X-OVERRIDE-bootstrap-room", "1")
	harness.WantStatus(t, a, 200)
}
