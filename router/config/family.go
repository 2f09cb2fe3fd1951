package config

import (
	"slices"
	"strings"
)

// family describes one P/D family to the configuration. Package pd/family implements the families; a
// test there compares the names.
type family struct {
	name        string
	description string // for sluice check, after "legs:"
	leased      bool   // prefill keeps the blocks of a handle for pd.lease
	decodeOnly  bool   // a decode worker can run the whole request
}

// familyTable lists the families in the order in which error messages name them.
var familyTable = []family{
	{"nixl", "vLLM NixlConnector: prefill, then decode, which gets the handle from prefill's response and pulls the blocks", true, true},
	{"nixl-push", "vLLM NixlPushConnector: prefill and decode at once if prefill's addresses are known from an earlier handle, else one after the other; prefill writes the blocks", true, true},
	{"sglang", "SGLang: prefill and decode at once; they find each other through prefill's bootstrap server", false, false},
	{"mooncake", "vLLM MooncakeConnector: prefill and decode at once, joined by a transfer_id, with the engine id from prefill's bootstrap server", true, true},
	{"lmcache", "LMCache over NIXL: prefill gets the prompt as token ids and writes the KV to the decode worker that its request names; decode starts when every tensor-parallel rank has reported its write", false, true},
	{"orchestrated", "any connector: prefill for one token, then decode with prefill's whole response as disagg_prefill_resp", false, true},
	{"storage", "a shared KV store: prefill for one token, then decode; with pd.cache_hit_threshold, decode first", false, true},
	{"trtllm", "TensorRT-LLM: a context_only request to prefill, then a generation_only request to decode with prefill's disaggregated_params", true, true},
	{"off", "", false, true},
}

// Families returns the accepted values of pd.family, with "off" last.
func Families() []string {
	var names []string
	for _, f := range familyTable {
		names = append(names, f.name)
	}
	return names
}

func familyOf(name string) *family {
	i := slices.IndexFunc(familyTable, func(f family) bool { return f.name == name })
	if i < 0 {
		return &family{name: name, description: "unknown"}
	}
	return &familyTable[i]
}

// joinOr joins words as "a, b or c".
func joinOr(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}
