package config

import (
	"slices"
	"strings"
)

// family is one prefill/decode hand-over as the configuration knows it. Package
// pd/family implements it; a test there compares the names.
type family struct {
	name        string
	description string // for sluice check, after "legs:"
	// leased: a handle is good for pd.lease; plain: a decode worker can prefill.
	leased, plain bool
}

// familyTable is in the order in which errors list the names.
var familyTable = []family{
	{"nixl", "vLLM NixlConnector: prefill, then decode with the handle prefill gave, which pulls the blocks", true, true},
	{"nixl-push", "vLLM NixlPushConnector: prefill and decode at once where prefill's addresses are known from an earlier handle, else one after the other; prefill writes the blocks", true, true},
	{"sglang", "SGLang: prefill and decode at once, which meet at prefill's bootstrap server", false, false},
	{"mooncake", "vLLM MooncakeConnector: prefill and decode at once, joined by a transfer_id, with the engine id from prefill's bootstrap server", true, true},
	{"lmcache", "LMCache over NIXL: the prompt as ids to prefill, which writes to the decode worker that the request names; decode starts once every tensor-parallel rank has reported its write", false, true},
	{"orchestrated", "any connector: prefill for one token, then decode with the whole answer as disagg_prefill_resp", false, true},
	{"storage", "a shared KV store: prefill for one token, then decode; where it has pd.cache_hit_threshold, decode first", false, true},
	{"trtllm", "TensorRT-LLM: context_only to prefill, then generation_only with its disaggregated_params", true, true},
	{"off", "", false, true},
}

// Families lists the names that pd.family may have, "off" last.
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

// joinOr is "a, b or c".
func joinOr(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}
