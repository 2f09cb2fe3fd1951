package family

import (
	"fmt"
	"strings"
	"testing"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// releaseCase is one hand-over of one engine release, from the client's request to its response.
type releaseCase struct {
	release      string
	handoverCase handoverCase // the client's body, prefill's response, and the peer information
	decode       string       // decode's response
	noHandle     bool         // prefill returns no handle: decode runs the whole request
}

// wholeAnswer returns a non-streaming completion with additional members at its end.
func wholeAnswer(text, reason, members string) string {
	return `{"id":"cmpl-r-1","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"` + text + `","finish_reason":"` + reason + `"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}` + members + `}`
}

// chatAnswer returns a non-streaming chat response.
func chatAnswer(text, reason, members string) string {
	return `{"id":"chatcmpl-r-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"` + text + `"},"finish_reason":"` + reason + `"}],"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}` + members + `}`
}

// releaseCases renders, for each release, the client's request, each leg's request and response,
// and what the client gets.
func releaseCases(t *testing.T, family Family, list []releaseCase) string {
	t.Helper()
	var out strings.Builder
	for i := range list {
		e := &list[i]
		s := &e.handoverCase
		s.name, s.family, s.version = e.release, family, e.release
		var doc jsonscan.Doc
		p := s.handover(t, &doc)
		order := family.Order(p)
		fmt.Fprintf(&out, "# %s: %s\n", e.release, orderNames[order])
		if asker, ok := family.(PeerInfoFetcher); ok {
			if base, path := asker.PeerInfoURL(p); base != "" {
				fmt.Fprintf(&out, "GET      %s%s\nanswer   %s\n", base, path, s.peerInfo)
			}
		}
		fmt.Fprintf(&out, "client   %s\n", s.body)
		send := func(name string, write func(*LegRequest, *Handover)) {
			var leg LegRequest
			write(&leg, p)
			fmt.Fprintf(&out, "%s  %s%s\n", name, leg.Path, doc.Edited(nil, leg.Edits...))
			if r := p.Decode; r.SendRank && !leg.RankInBody {
				fmt.Fprintf(&out, "         X-data-parallel-rank: %d\n", r.ID.Rank)
			}
		}
		send("prefill", family.Prefill)
		fmt.Fprintf(&out, "answer   %s\n", s.answer)
		if order == PrefillFirst {
			p.Answer, p.PrefillCached = []byte(s.answer), 2
			var err error
			if p.Handle, err = family.Handle(p, p.Answer); (err != nil) != e.noHandle {
				t.Errorf("%s %s: handle %q, error %v", family.Name(), e.release, p.Handle, err)
			}
			if err != nil {
				fmt.Fprintf(&out, "plain    %v\n\n", err)
				continue
			}
		}
		send("decode ", family.Decode)
		fmt.Fprintf(&out, "answer   %s\nclient   %s\n\n", e.decode, RedactHandle([]byte(e.decode)))
	}
	return out.String()
}

// nixlHandles are prefill's kv_transfer_params as the tested releases write them. A release has the
// form of the last entry that is not later.
var nixlHandles = []struct{ release, members string }{
	{"0.9.0", `"remote_block_ids":[7,8],"remote_engine_id":"e1","remote_host":"10.0.0.1","remote_port":5557`},
	{"0.9.1", `"remote_block_ids":[7,8],"remote_engine_id":"e1","remote_host":"10.0.0.1","remote_port":5557,"tp_size":1`},
	{"0.13.0", `"remote_block_ids":[7,8],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1`},
	{"0.14.1", `"remote_block_ids":[7,8],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1`},
	{"0.18.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1`},
	{"0.21.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":3`},
	{"0.26.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":null`},
	{"0.28.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":null,"transfer_mode":"pull"`},
	{"0.29.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":null,"transfer_mode":"pull"`},
	{"0.31.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0`},
	{"0.33.0", `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1,"dcp_size":1,"pp_size":1,"remote_num_tokens":3,"remote_blocks_expiry_time":null,"transfer_mode":"pull","remote_prefill_cached_tokens":0,"remote_registration_generation":0`},
}

func paramsMember(members string) string {
	return `,"kv_transfer_params":{"do_remote_prefill":true,"do_remote_decode":false,` + members + `}`
}

// TestReleasesExchanges compares the requests and responses of each family and release with golden
// text. The other families are in *_legs.txt.
func TestReleasesExchanges(t *testing.T) {
	done := chatAnswer(" cat", "length", `,"kv_transfer_params":null`)
	ended, chatEnded := wholeAnswer(" cat", "stop", ""), chatAnswer(" cat", "stop", "")
	const chat = `{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":9}`

	var pull []releaseCase
	for _, h := range nixlHandles {
		answer := chatAnswer("The", "length", paramsMember(h.members))
		if h.release == "0.33.0" { // as 0.32's: asked for, for decode
			answer = strings.Replace(answer, `"usage"`, `"prompt_token_ids":[1,2,3],"usage"`, 1)
		}
		pull = append(pull, releaseCase{release: h.release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: answer}, decode: done})
	}
	pull = append(pull, releaseCase{release: "0.20.0", handoverCase: handoverCase{kind: front.Completions, body: promptBody, answer: wholeAnswer("x", "stop", `,"kv_transfer_params":null`)}, noHandle: true})
	golden(t, "testdata/nixl_releases.txt", releaseCases(t, nixlPull{}, pull))

	var push []releaseCase
	for _, release := range []string{"0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.33.0"} {
		members := `"remote_block_ids":[[7,8]],"remote_engine_id":"e1","remote_request_id":"cmpl-r-1-0-0badcafe","remote_host":"10.0.0.1","remote_port":5600,"tp_size":1`
		if release >= "0.26" {
			members += `,"pp_size":1`
		}
		if release >= "0.30" {
			members += `,"dcp_size":1`
		}
		members += `,"remote_num_tokens":3`
		if release >= "0.28" {
			members += `,"transfer_mode":"push"`
		}
		answer := wholeAnswer("The", "length", paramsMember(members))
		handle := `{"do_remote_prefill":true,"do_remote_decode":false,` + members + `}`
		push = append(push,
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Completions, body: promptBody, answer: answer}, decode: ended},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Completions, body: promptBody, answer: answer, learned: handle}, decode: ended},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: chatAnswer("The", "length", paramsMember(members)), learned: handle}, decode: done})
	}
	golden(t, "testdata/nixl_push_legs.txt", releaseCases(t, nixlPush{}, push))

	query := `{"0":{"engine_id":"e-0","worker_addr":{"0":{"0":"10.0.0.1:5000"}}}}`
	var moon []releaseCase
	for _, release := range []string{"0.13.0", "0.15.1"} {
		answer := chatAnswer("The", "length", paramsMember(`"remote_host":"10.0.0.1","remote_port":6000`))
		moon = append(moon, releaseCase{release: release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: answer}, decode: done})
	}
	for _, release := range []string{"0.16.0", "0.24.0", "0.33.0"} {
		answer := wholeAnswer("The", "length", `,"kv_transfer_params":null`)
		moon = append(moon,
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: chatAnswer("The", "length", `,"kv_transfer_params":null`), peerInfo: query, prefill: bootstrap}, decode: done},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Completions, body: promptBody, answer: answer, peerInfo: query}, decode: ended})
	}
	golden(t, "testdata/mooncake_legs.txt", releaseCases(t, mooncake{}, moon))

	var lang []releaseCase
	native := `{"text":" cat","output_ids":[785],"meta_info":{"id":"a1","finish_reason":{"type":"length","length":1},"prompt_tokens":3,"completion_tokens":1,"cached_tokens":0}}`
	for _, release := range []string{"0.4.6.post5", "0.5.8", "0.5.10", "0.5.23"} {
		lang = append(lang,
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: chatEnded, prefill: bootstrap}, decode: chatEnded},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Completions, body: batchBody, answer: ended, prefill: bootstrap, ranks: 2}, decode: ended},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.NativeGenerate, body: `{"text":"hi","sampling_params":{"max_new_tokens":9}}`, answer: native, prefill: bootstrap}, decode: native},
			releaseCase{release: release, handoverCase: handoverCase{kind: front.Chat, body: chat, answer: chatAnswer("", "length", `,"disaggregated_params":{"bootstrap_host":"10.0.0.9","bootstrap_port":8998,"bootstrap_room":9223372036854775807}`)}, decode: chatEnded})
	}
	golden(t, "testdata/sglang_legs.txt", releaseCases(t, sglang{}, lang))
}
