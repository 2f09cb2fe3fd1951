package family

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

var rewrite = flag.Bool("rewrite", false, "rewrite the golden files")

// handles are kv_transfer_params members as vLLM releases return them: a flat list of ids, a list
// per KV group, members of later releases, and forms that must never reach a decode engine.
var handles = []struct{ name, member string }{
	{"v0.9", `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[7,8,9],"remote_engine_id":"e1","remote_host":"127.0.0.1","remote_port":5557}`},
	{"v0.18", `{"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[7, 8], [3]], "remote_engine_id": "e1", "remote_request_id": "cmpl-1-0-ab", "remote_host": "127.0.0.1", "remote_port": 5600, "tp_size": 1}`},
	{"v0.32", `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7,8,9,10,11,12,13]],"remote_engine_id":"5f","remote_request_id":"cmpl-pd-1-0-0f","remote_host":"127.0.0.1","remote_port":5601,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":200,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0}`},
	{"big integers and unknown members", `{"do_remote_prefill":true,"remote_block_ids":[[18446744073709551615]],"remote_engine_id":"e","remote_host":"h","remote_port":1,"x":9007199254740993,"y":1.50e+3}`},
}

var badHandles = []struct{ name, body string }{
	{"no member", `{"id":"x"}`},
	{"null", `{"kv_transfer_params":null}`},
	{"not an object", `{"kv_transfer_params":"abc"}`},
	{"block ids missing", `{"kv_transfer_params":{"remote_engine_id":"e","remote_host":"h","remote_port":1}}`},
	{"block ids null", `{"kv_transfer_params":{"remote_block_ids":null,"remote_engine_id":"e","remote_host":"h","remote_port":1}}`},
	{"block ids empty", `{"kv_transfer_params":{"remote_block_ids":[],"remote_engine_id":"e","remote_host":"h","remote_port":1}}`},
	{"block ids a list of empty lists", `{"kv_transfer_params":{"remote_block_ids":[[],[ ]],"remote_engine_id":"e","remote_host":"h","remote_port":1}}`},
	{"engine id null", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":null,"remote_host":"h","remote_port":1}}`},
	{"host missing", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_port":1}}`},
	{"engine id a number", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":7,"remote_host":"h","remote_port":1}}`},
	{"host a number", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":7,"remote_port":1}}`},
	{"host a list", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":["h"],"remote_port":1}}`},
	{"host empty", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"","remote_port":1}}`},
	{"port a string", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":"5600"}}`},
	{"port an object", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":{}}}`},
	{"port a fraction", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":5600.5}}`},
	{"port 0", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":0}}`},
	{"port negative", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":-1}}`},
	{"port too large", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":65536}}`},
	{"request id a number", `{"kv_transfer_params":{"remote_block_ids":[1],"remote_engine_id":"e","remote_host":"h","remote_port":1,"remote_request_id":7}}`},
	{"cut short", `{"kv_transfer_params":{"remote_block_ids":[1],"remote`},
	{"not JSON", `<html>`},
}

func TestHandleIsVerbatim(t *testing.T) {
	for _, h := range handles {
		body := `{"id":"cmpl-1","choices":[{"text":"kv_transfer_params"}],"kv_transfer_params":` + h.member + `,"usage":{}}`
		got, err := nixlPull{}.Handle(&Handover{}, []byte(body))
		if err != nil {
			t.Errorf("%s: %v", h.name, err)
			continue
		}
		if string(got) != h.member {
			t.Errorf("%s: handle is\n%s\nwant it byte for byte:\n%s", h.name, got, h.member)
		}
	}
}

// TestHandleGetsDecodeFlags: a handle whose flags are not those of a decode leg is complete. The
// decode engine gets it with the right flags, and everything else byte for byte.
func TestHandleGetsDecodeFlags(t *testing.T) {
	const rest = `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"r","remote_host":"h","remote_port":1,"tp_size":1`
	for flags, want := range map[string]string{
		`"do_remote_prefill":false,"do_remote_decode":true`:                              `"do_remote_prefill":true,"do_remote_decode":false`,
		`"do_remote_decode" : true , "do_remote_prefill" : null`:                         `"do_remote_decode" : false , "do_remote_prefill" : true`,
		`"do_remote_prefill":true,"do_remote_decode":true`:                               `"do_remote_prefill":true,"do_remote_decode":false`,
		`"do_remote_prefill":1`:                                                          `"do_remote_prefill":true`,
		`"do_remote_prefill":true`:                                                       `"do_remote_prefill":true`,
		`"do_remote_prefill":true,"do_remote_decode":null`:                               `"do_remote_prefill":true,"do_remote_decode":null`,
		`"do_remote_prefill":true,"do_remote\u005fdecode":"x","do_remote_prefill":false`: `"do_remote_prefill":true,"do_remote\u005fdecode":false,"do_remote_prefill":true`,
		`"do_remote_decode":true`:                                                        `"do_remote_prefill":true,"do_remote_decode":false`,
		`"x":1`:                                                                          `"do_remote_prefill":true,"x":1`,
	} {
		for _, family := range []Family{nixlPull{}, nixlPush{}, mooncake{}} {
			for _, form := range [...][2]string{{"{" + flags + "," + rest + "}", "{" + want + "," + rest + "}"}, {"{" + rest + "," + flags + "}", "{" + rest + "," + want + "}"}} {
				if insert := `"do_remote_prefill":true,`; !strings.Contains(flags, "prefill") { // it stands first
					form[1] = "{" + insert + strings.Replace(form[1][1:], insert, "", 1)
				}
				p := &Handover{}
				got, err := family.Handle(p, []byte(`{"choices":[],"kv_transfer_params":`+form[0]+`}`))
				if err != nil || string(got) != form[1] {
					t.Errorf("%s: %s\ngives %s, %v\nwant  %s", family.Name(), form[0], got, err, form[1])
				}
				if family.Name() != "mooncake" && string(p.EngineID) != `"e1"` {
					t.Errorf("%s: %s: engine id %s", family.Name(), form[0], p.EngineID)
				}
			}
		}
	}
}

func TestIncompleteHandleIsRefused(t *testing.T) {
	for _, h := range badHandles {
		if got, err := (nixlPull{}).Handle(&Handover{}, []byte(h.body)); !errors.Is(err, ErrIncompleteHandle) {
			t.Errorf("%s: got %q, %v; want ErrIncompleteHandle: a decode engine dies of it", h.name, got, err)
		}
	}
}

// TestLegBodies compares the bodies of both legs, for each endpoint, with golden text.
func TestLegBodies(t *testing.T) {
	requests := []struct {
		kind front.Kind
		name string
		body string
	}{
		{front.Chat, "chat", `{"model":"m","messages":[{"role":"user","content":"hi \u00e9"}]}`},
		{front.Chat, "chat with everything", `{"stream":true, "stream_options":{"include_usage":true},"model":"m","messages":[],"max_tokens":200,"max_completion_tokens":300,"min_tokens":5,"n":2,"seed":9007199254740993,"x_unknown":{"b":1,"a":2}}`},
		{front.Completions, "completions", `{"model":"m","prompt":[1,2,3],"max_tokens":16,"min_tokens":4}`},
		{front.ResponsesAPI, "responses", `{"model":"m","input":"hi","max_output_tokens":99,"stream":true}`},
		{front.Messages, "messages", `{"model":"m","messages":[],"max_tokens":7,"stream":true}`},
		{front.Generate, "generate", `{"token_ids":[1,2],"sampling_params":{"max_tokens":9,"min_tokens":2,"temperature":0,"n":2},"stream":true}`},
		{front.Generate, "generate without sampling_params", `{"token_ids":[1,2]}`},
		{front.Generate, "generate with null sampling_params", `{"token_ids":[1,2],"sampling_params":null}`},
		{front.Chat, "members first and last", `{"stream":true,"model":"m","messages":[],"min_tokens":1}`},
	}
	var out strings.Builder
	for _, r := range requests {
		var doc jsonscan.Doc
		if err := doc.Scan([]byte(r.body), jsonscan.Limits{}); err != nil {
			t.Fatalf("%s: %v", r.name, err)
		}
		p := Handover{Kind: r.kind, Doc: &doc, Handle: []byte(handles[1].member)}
		var prefillLeg, decodeLeg LegRequest
		nixlPull{}.Prefill(&prefillLeg, &p)
		nixlPull{}.Decode(&decodeLeg, &p)
		prefill, decode := doc.Edited(nil, prefillLeg.Edits...), doc.Edited(nil, decodeLeg.Edits...)
		fmt.Fprintf(&out, "# %s\nclient  %s\nprefill %s\ndecode  %s\n\n", r.name, r.body, prefill, decode)
	}
	golden(t, "testdata/nixl_legs.txt", out.String())
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *rewrite {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s differs; run with -rewrite and review the diff. Got:\n%s", path, got)
	}
}

func TestFamilyByName(t *testing.T) {
	if _, err := ByName("nixl"); err != nil {
		t.Error(err)
	}
	if _, err := ByName("carrier-pigeon"); err == nil || !strings.Contains(err.Error(), `"carrier-pigeon"`) {
		t.Errorf("unknown family: %v; want an error that quotes it", err)
	}
}

func TestWithoutHandle(t *testing.T) {
	for in, want := range map[string]string{
		`{"a":1}`:                           `{"a":1}`,
		`{"kv_transfer_params":null,"a":1}`: `{"kv_transfer_params":null,"a":1}`,
		`{"a":1,"kv_transfer_params": {"remote_host":"h"} ,"b":2}`:   `{"a":1,"kv_transfer_params": null ,"b":2}`,
		`{"n":{"kv_transfer_params":null},"kv_transfer_params":[1]}`: `{"n":{"kv_transfer_params":null},"kv_transfer_params":null}`,
		`{"text":"\"kv_transfer_params\":{}"}`:                       `{"text":"\"kv_transfer_params\":{}"}`,
		`{"broken`:                                                   `{"broken`,
	} {
		if got := string(RedactHandle([]byte(in))); got != want {
			t.Errorf("withoutHandle(%s) = %s, want %s", in, got, want)
		}
	}
}
