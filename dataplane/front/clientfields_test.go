package front

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"sluice/dataplane/fieldrules"
)

const peerID = "___prefill_addr_10.0.0.9:1___decode_addr_10.0.0.8:1_0"

// TestClientCannotNamePeer sends addresses and files that engines would connect to or open, to
// every endpoint.
func TestClientCannotNamePeer(t *testing.T) {
	hosts := fieldrules.MediaHosts{"img.example", "*.cdn.example", "10.1.2.3", "fd00::1"}
	r := start(t, Options{MediaHosts: hosts}, echo)
	part := func(part string) string { return `"messages":[{"role":"user","content":[` + part + `]}]` }
	image := func(url string) string { return part(`{"type":"image_url","image_url":{"url":` + url + `}}`) }
	quote := func(s string) string { b, _ := json.Marshal(s); return string(b) }
	type try struct {
		members string
		field   string // the refused field; "": the request is accepted
	}
	tries := []try{
		{`"request_id":"` + peerID + `"`, "request_id"},
		{`"request_id":"a\u005fb_prefill_\u0061ddr_10.0.0.1:1"`, "request_id"},
		{`"request_id":"has space"`, "request_id"},
		{`"request_id":""`, "request_id"},
		{`"request_id":"` + strings.Repeat("x", 129) + `"`, "request_id"},
		{`"request_id":"plain-1"`, ""},
		{`"request_id":null`, ""},
		{`"rid":"` + peerID + `"`, "rid"},
		{`"r\u0069d":["ok","` + peerID + `"]`, "rid.1"},
		{`"rid":["a","b"]`, ""},
		{`"rid":[["a"]]`, "rid.0"},
		{`"RID":"` + peerID + `"`, "RID"},
		{`"session_params":{"rid":"` + peerID + `"}`, "session_params.rid"},
		{`"lora_request":{"lora_name":"a","lora_path":"/etc"}`, "lora_request"},
		{`"encoder_urls":["http://10.0.0.1"]`, "encoder_urls"},
		{`"http_worker_ipc":"ipc:///tmp/x"`, "http_worker_ipc"},
		{`"kv_hints":{"actions":[]}`, "kv_hints"},
		{`"sampling_params":{"extra_args":{"kv_transfer_params":{}}}`, "sampling_params.extra_args.kv_transfer_params"},
		{`"sampling_params":[{"extra_args":{"kv_transfer_params":{}}}]`, "sampling_params.0.extra_args.kv_transfer_params"},
		{`"vllm_xargs":{"lora_request":1}`, "vllm_xargs.lora_request"},

		{image(`"data:image/png;base64,AAAA"`), ""},
		{image(`"data:image\/png;base64,AAAA"`), ""},
		{image(`"\u0064ata:image/png;base64,AAAA"`), ""},
		{image(`null`), ""},
		{image(`"http://img.example/a.png?b#c"`), ""},
		{image(`"HTTPS://IMG.example:8443/a@b"`), ""},
		{image(`"https:\/\/a.b.cdn.example"`), ""},
		{image(`"http://10.1.2.3/x"`), ""},
		{image(`"http://[fd00::1]:80/x"`), ""},
		{part(`{"type":"image_url","image_url":"http://169.254.169.254/latest"}`), "messages.0.content.0.image_url"},
		{part(`{"type":"text","text":"see http://169.254.169.254/ and image_url"}`), ""},
		{part(`{"type":"image","source":{"type":"url","url":"http://10.0.0.1/"}}`), "messages.0.content.0.source.url"},
		{part(`{"type":"image","source":{"type":"base64","media_type":"image/png","data":"AAAA"}}`), ""},
		{part(`{"type":"tool_result","content":[{"type":"image","source":{"type":"url","url":"file:///etc/passwd"}}]}`), "messages.0.content.0.content.0.source.url"},
		{part(`{"type":"tool_use","id":"a","name":"fetch","input":{"url":"http://10.0.0.1/","image":"x"}}`), ""},
		{part(`{"type":"image","url":"http://10.0.0.1/"}`), "messages.0.content.0.url"},
		{part(`{"type":"\u0069\u006e\u0070\u0075\u0074\u005f\u0069\u006d\u0061\u0067\u0065","url":"file:///etc/passwd"}`), "messages.0.content.0.url"},
		{part(`{"type":"input_audio","input_audio":{"data":"AAAA","format":"wav"}}`), ""},
		{part(`{"type":"video_url","video_url":{"url":"http://10.0.0.1/"}}`), "messages.0.content.0.video_url.url"},
		{part(`{"type":"audio_url","audio_\u0075rl":{"\u0075rl":"http://10.0.0.1/"}}`), "messages.0.content.0.audio_url.url"},
		{part(`{"type":"image_url","Image_URL":{"Url":"http://10.0.0.1/"}}`), "messages.0.content.0.Image_URL.Url"},
		{part(`{"url":"http://10.0.0.1/","type":"image"}`), "messages.0.content.0.url"},
		{part(`{"type":"text","url":"http://10.0.0.1/","type":"image"}`), "messages.0.content.0.url"},
		{part(`{"type":"image","url":"http://10.0.0.1/","type":"text"}`), "messages.0.content.0.url"},
		{part(`{"type":"image","url":{"type":"image","url":"/etc/passwd"}}`), "messages.0.content.0.url.url"},
		{`"a":` + strings.Repeat("[", 40) + `{"image_url":"/etc/passwd"}` + strings.Repeat("]", 40), "a" + strings.Repeat(".0", 40) + ".image_url"},
		{part(`{"image_url":["data:a",{"url":"/etc/passwd"}]}`), "messages.0.content.0.image_url.1.url"},
		{`"messages":[{"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f","arguments":"{\"image_url\":\"http://10.0.0.1\"}"}}]}]`, ""},
		{`"messages":[{"role":"user","content":"a","annotations":[{"type":"url_citation","url":"http://10.0.0.1"}]}]`, ""},
		{`"input":[{"role":"user","content":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]`, "input.0.content.0.image_url"},
		{`"input":[{"role":"user","content":[{"type":"input_file","file_url":"http://10.0.0.1/"}]}]`, "input.0.content.0.file_url"},
		{`"input":[{"type":"function_call_output","output":[{"type":"input_image","image_url":"http://10.0.0.1/"}]}]`, "input.0.output.0.image_url"},
		{`"input":[{"text":"a","image":"http://10.0.0.1/"}]`, "input.0.image"},
		{`"input":[{"type":"web_search_call","action":{"type":"search","sources":[{"type":"url","url":"http://10.0.0.1"}]}}]`, ""},
		{`"tools":[{"type":"mcp","server_label":"a","server_url":"http://10.0.0.1/"}]`, "tools.0.server_url"},
		{`"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"image_url":{"type":"string","default":"http://10.0.0.1/"}}}}}]`, ""},
		{`"image_data":["http://10.0.0.1/"]`, "image_data.0"},
		{`"image_data":"/etc/passwd"`, "image_data"},
		{`"video_data":[[{"url":"http://10.0.0.1/"}]]`, "video_data.0.0.url"},
		{`"documents":[{"content":[{"type":"image_url","image_url":{"url":"http://10.0.0.1/"}}]}]`, "documents.0.content.0.image_url.url"},
		{`"documents":[{"title":"a","source":"http://10.0.0.1/","url":"http://10.0.0.1/"}]`, ""},
		{`"media_io_kwargs":{"video":{"num_frames":4},"image":{}}`, ""},
	}
	for _, url := range []string{
		"http://169.254.169.254/", "file:///etc/passwd", "/etc/passwd", "etc/a.png", "ftp://img.example/", "//img.example/",
		" http://img.example/", "http://img.example /", "http://img.example\\@10.0.0.1/", "http://img.example@10.0.0.1/", "http://10.0.0.1#@img.example/",
		"http://10.0.0.1?@img.example/", "http://img.example:80@10.0.0.1/", "http://img.example.evil/", "http://evilimg.example/", "http://cdn.example/",
		"http://xcdn.example/", "http:img.example/", "http:/img.example/", "http:///img.example/", "http://img.example:/", "http://img.example:0/", "http://img.example:99999/",
		"http://img%2eexample/", "http://\u0131mg.example/", "http://img.example/\u00e9", "http://img.example/\x00", "http://[fd00::1%25lo]/", "http://[fd00::1/", "http://0x0a010203/",
		"http://167838211/", "AAAA", "javascript:1", "http://" + strings.Repeat("a", 9<<10) + ".cdn.example/",
	} {
		tries = append(tries, try{image(quote(url)), "messages.0.content.0.image_url.url"})
	}
	tries = append(tries, try{image(`"http://img.example./a"`), ""}, try{image(`""`), ""})
	for _, e := range Endpoints {
		for _, try := range tries {
			if e.Kind == Preprocessed {
				continue // its handler reads another format
			}
			body := `{"model":"m",` + try.members + `}`
			before := r.calls.Load()
			resp, err := http.Post("http://"+r.addr+e.Path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(resp.Body)
			resp.Body.Close()
			if try.field == "" {
				want := body
				if e.Kind == ResponsesAPI && strings.Contains(body, `"request_id":"`) {
					want = `{"model":"m"}`
				}
				if resp.StatusCode != 200 || string(got) != want {
					t.Errorf("%s %.200s: %d %.300s", e.Path, body, resp.StatusCode, got)
				}
				continue
			}
			var reported struct {
				Error struct{ Param, Message string }
			}
			_ = json.Unmarshal(got, &reported)
			if want := fmt.Sprintf("field %q ", try.field); resp.StatusCode != 400 || !strings.Contains(string(got), strings.Trim(quote(want), `"`)) {
				t.Errorf("%s %.200s: %d %.300s; want 400 for %s", e.Path, body, resp.StatusCode, got, try.field)
			}
			if r.calls.Load() != before {
				t.Errorf("%s %.200s reached the handler", e.Path, body)
			}
		}
	}
}

// TestMediaOfAnyHost checks that "*" allows URLs of any host, but no files.
func TestMediaOfAnyHost(t *testing.T) {
	r := start(t, Options{MediaHosts: fieldrules.MediaHosts{"*"}}, echo)
	for url, status := range map[string]int{"http://10.0.0.1/a.png": 200, "https://a.b": 200, "file:///etc/passwd": 400, "/etc/passwd": 400, "http://a@b/": 400} {
		body := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"` + url + `"}}]}]}`
		resp, err := http.Post("http://"+r.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != status {
			t.Errorf("%s: %d, want %d", url, resp.StatusCode, status)
		}
	}
}

// TestLoaderArguments: what engines pass to the loader of a processor names no place and no
// credential, however it is nested, written or spelled.
func TestLoaderArguments(t *testing.T) {
	r := start(t, Options{MediaHosts: fieldrules.MediaHosts{"*"}}, echo)
	for arguments, field := range map[string]string{
		`null`: "", `{}`: "", `{"num_crops":4,"do_resize":true,"fps":1.5,"size":{"shortest_edge":28,"longest_edge":null},"mean":[0.5,[0.5,-1]]}`: "",
		`{"proxies":null}`:                                     "",
		`{"cache_dir":"/tmp/x"}`:                               "mm_processor_kwargs.cache_dir",
		`{"proxies":{"https":"http://evil:1"}}`:                "mm_processor_kwargs.proxies",
		`{"trust_remote_code":true}`:                           "mm_processor_kwargs.trust_remote_code",
		`{"tru\u0073t_remote_code":true}`:                      "mm_processor_kwargs.trust_remote_code",
		`{"Token":1}`:                                          "mm_processor_kwargs.Token",
		`{"images_kwargs":{"a":[1,{"token":false}]}}`:          "mm_processor_kwargs.images_kwargs.a.1.token",
		`{"fps":1,"x":[1, 2,"/etc/passwd"]}`:                   "mm_processor_kwargs.x.2",
		`"http://evil.example/x"`:                              "mm_processor_kwargs",
		`{"a":{"b":{"url":"https://evil.example/x"}},"c":1.5}`: "mm_processor_kwargs.a.b.url",
	} {
		for _, name := range []string{"mm_processor_kwargs", `mm_processor_kwarg\u0073`} {
			for where, body := range map[string]string{"": `{"model":"m","` + name + `":` + arguments + `,"messages":[]}`, "messages.0.": `{"model":"m","messages":[{"` + name + `":` + arguments + `}]}`} {
				resp, err := http.Post("http://"+r.addr+"/v1/chat/completions", "application/json", strings.NewReader(body))
				if err != nil {
					t.Fatal(err)
				}
				answer, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				if field == "" {
					if resp.StatusCode != 200 {
						t.Errorf("%s: %d %s", body, resp.StatusCode, answer)
					}
				} else if resp.StatusCode != 400 || !strings.Contains(string(answer), `"param":"`+where+field+`"`) {
					t.Errorf("%s: %d %s; want %s%s refused", body, resp.StatusCode, answer, where, field)
				}
			}
		}
	}
}
