package engineapi_test

import (
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"sluice/bench/sim"
	"sluice/dataplane/fieldrules"
	"sluice/router/config"
	"sluice/router/e2e/harness"
	"sluice/router/engineapi"
	"sluice/router/engineapi/client"
)

const peerID = "___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:1_0"

// fieldEngines are the engine APIs in which the router writes a request.
var fieldEngines = []struct {
	name   string
	engine func(*sim.Options)
	conf   func(*config.Config)
}{
	{"completions", nil, func(c *config.Config) { c.EngineAPI.VLLMDialect = "completions" }},
	{"generate", nil, func(c *config.Config) { c.EngineAPI.VLLMDialect = "generate" }},
	{"SGLang", func(o *sim.Options) { o.Engine = "sglang" }, nil},
	{"TensorRT-LLM", func(o *sim.Options) { o.Engine = "trtllm" }, func(c *config.Config) {
		for i := range c.Workers {
			harness.WithoutEvents(&c.Workers[i], nil)
		}
	}},
}

type members = map[string]any

// hostileValues returns values that lead an engine to another host, a file or another request,
// in every form that a member may have.
func hostileValues(onlyRouter bool) []any {
	if onlyRouter {
		return []any{members{"remote_host": "10.0.0.9", "remote_port": 5600}, "http://10.0.0.9/", []any{"http://10.0.0.9/"}, 7}
	}
	return []any{peerID, []any{peerID}} // as media it is the name of a file
}

// TestSocketRefusesEngineFields sends every member of the front's table of members that engines act
// on over the framed socket, for each engine API, in every part of a request that the router merges
// into the engine's body. What a client may not send over HTTP is refused there too, with the same
// answer, and no engine sees it.
func TestSocketRefusesEngineFields(t *testing.T) {
	for _, k := range fieldEngines {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			r, engines := harness.StartEngineRouter(t, 1, k.engine, k.conf)
			c := harness.DialEngine(t, r, "tcp")
			tries := 0
			for name, onlyRouter := range fieldrules.EngineFields() {
				for _, hostile := range hostileValues(onlyRouter) {
					refused := members{name: hostile}
					if name == "url" { // it names media if the type beside it does
						refused["type"] = "image"
					}
					if a := harness.Post(t, r.URL+"/v1/completions", body(t, members{"model": "sim", "prompt": "a"}, refused)); a.Status != 400 {
						t.Errorf("HTTP accepts %v: %d %s", refused, a.Status, a.Body)
					}
					places := map[string]members{
						"":                             refused,
						"stop_conditions.":             {"stop_conditions": refused},
						"sampling_options.":            {"sampling_options": refused},
						"output_options.":              {"output_options": refused},
						"extra_args.":                  {"extra_args": refused},
						"sampling_options.extra_args.": {"sampling_options": members{"extra_args": refused}},
					}
					if !onlyRouter {
						places["parts.0.inner."] = members{"parts": []any{members{"inner": refused}}}
					}
					if name == "request_id" { // engines read it at the top of their body only
						maps.DeleteFunc(places, func(place string, _ members) bool {
							return strings.HasSuffix(place, "extra_args.") || place == "parts.0.inner."
						})
					}
					for place, part := range places {
						tries++
						request := members{"model": "sim", "token_ids": []any{1, 2, 3}, "stop_conditions": members{"max_tokens": 1}}
						maps.Copy(request, part)
						if in, ok := part["stop_conditions"].(members); ok {
							request["stop_conditions"] = with(in, "max_tokens", 1)
						}
						wantRefused(t, r, c, request, place+name)
					}
				}
			}
			if n := len(harness.GenerateRequests(engines[0])); n != 0 {
				t.Errorf("%d of %d requests reached the engine", n, tries)
			}
			// The same request without these members is served: it is they that are refused.
			if a := harness.GenerateEngineAPI(t, c, harness.EngineAPIRequest([]uint32{1, 2, 3}, 1)); a.Failure != nil || a.Err != nil {
				t.Errorf("a plain request: %v %v", a.Failure, a.Err)
			}
		})
	}
}

// TestSocketRefusesReservedFields: a caller of the framed socket can set no member that the router
// writes itself, such as lora_path and cache_salt, and can name no peers in the request's id.
func TestSocketRefusesReservedFields(t *testing.T) {
	r, engines := harness.StartEngineRouter(t, 1, nil, nil)
	c := harness.DialEngine(t, r, "tcp")
	request := func(name string, v any) members {
		return members{"model": "sim", "token_ids": []any{1, 2, 3}, "stop_conditions": members{"max_tokens": 1}, name: v}
	}
	top, sampling := engineapi.ReservedFields()
	for _, name := range top {
		wantRefused(t, r, c, request(name, "a"), name)
	}
	for _, name := range sampling {
		wantRefused(t, r, c, request("sampling_options", members{name: "a"}), "sampling_options."+name)
	}
	wantRefused(t, r, c, request("context", members{"id": peerID}), "context.id")
	if n := len(harness.GenerateRequests(engines[0])); n != 0 {
		t.Errorf("%d requests reached the engine", n)
	}
}

// wantRefused sends a request over the socket and to the HTTP endpoint of the engine API. Both
// must refuse it in the same way, for the same member, which is want.
func wantRefused(t *testing.T, r *harness.Router, c *client.Client, request members, want string) {
	t.Helper()
	answer := harness.Post(t, r.URL+"/v1/engine/generate", body(t, request))
	a := harness.GenerateEngineAPI(t, c, &client.Request{Extra: request})
	if a.Failure == nil || a.Err != nil || len(a.Tokens) > 0 {
		t.Errorf("the socket accepts %s: %v", body(t, request), a.Err)
		return
	}
	if answer.Status != 400 || a.Failure.Code != 400 {
		t.Errorf("%s: the socket says %+v, HTTP %d %s", body(t, request), a.Failure, answer.Status, answer.Body)
		return
	}
	_, typ, param := answer.ErrorOf(t)
	if typ != a.Failure.Type || !isAt(param, want) || !isAt(a.Failure.Param, want) {
		t.Errorf("%s: the socket refuses %s (%s), HTTP %s (%s); want %s", body(t, request), a.Failure.Param, a.Failure.Type, param, typ, want)
	}
}

// isAt returns whether the path of a refused member is want or within it. HTTP names the element
// of a list where the section's own check names the list. A url that only its neighbour makes the
// place of a medium is found in the engine's body, where the members of a section have another
// place.
func isAt(path, want string) bool {
	path = strings.TrimSuffix(path, ".0")
	if path == want || strings.HasPrefix(path, want+".") {
		return true
	}
	section, name, _ := strings.Cut(want, ".")
	return name == "url" && strings.Contains(section, "_") && (path == name || path == "sampling_params."+name)
}

func with(m members, name string, v any) members {
	m = maps.Clone(m)
	m[name] = v
	return m
}

func body(t *testing.T, parts ...members) string {
	t.Helper()
	all := members{}
	for _, p := range parts {
		maps.Copy(all, p)
	}
	b, err := json.Marshal(all)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}
