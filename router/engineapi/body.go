package engineapi

import (
	"bytes"
	"strconv"

	"sluice/dataplane/jsonscan"
)

// spelling is the name of a field among the sampling members of each dialect; "" where the
// dialect has no such member. Fields that are not listed are written by other code or not at
// all.
type spelling struct {
	f                    field
	vllm, sglang, trtllm string
}

func (n *spelling) in(d engineDialect) string {
	switch d {
	case native:
		return n.sglang
	case trtllm:
		return n.trtllm
	}
	return n.vllm
}

var samplingNames = [...]spelling{
	{fStopStrings, "stop", "stop", "stop"},
	{fMinTokens, "min_tokens", "min_new_tokens", "min_tokens"},
	{fIgnoreEOS, "ignore_eos", "ignore_eos", "ignore_eos"},
	{fMaxThinking, "thinking_token_budget", "", "thinking_token_budget"},
	{fN, "n", "n", "n"},
	{fBestOf, "best_of", "", "best_of"},
	{fPresence, "presence_penalty", "presence_penalty", "presence_penalty"},
	{fFrequency, "frequency_penalty", "frequency_penalty", "frequency_penalty"},
	{fRepetition, "repetition_penalty", "repetition_penalty", "repetition_penalty"},
	{fTemperature, "temperature", "temperature", "temperature"},
	{fTopP, "top_p", "top_p", "top_p"},
	{fTopK, "top_k", "top_k", "top_k"},
	{fMinP, "min_p", "min_p", "min_p"},
	{fBeam, "use_beam_search", "", "use_beam_search"},
	{fLengthPenalty, "length_penalty", "", "length_penalty"},
	{fSeed, "seed", "sampling_seed", "seed"},
	{fIncludeStop, "include_stop_str_in_output", "", "include_stop_str_in_output"},
	{fGuided, "structured_outputs", "", "response_format"},
	{fSkipSpecial, "skip_special_tokens", "skip_special_tokens", "skip_special_tokens"},
	{fPromptLogprobs, "", "", ""}, // no engine streams them
	{fNoStopTrim, "", "no_stop_trim", ""},
}

// ignorableFields maps fields to the value that requests nothing. An engine without such a
// member may ignore that value.
var ignorableFields = map[field]string{fBestOf: "1", fBeam: "false", fIncludeStop: "false", fNoStopTrim: "false", fMaxThinking: "0"}

// object writes the members of a JSON object.
type object struct {
	dst []byte
	n   int
}

func (o *object) key(name string) {
	if o.n > 0 {
		o.dst = append(o.dst, ',')
	}
	o.n++
	o.dst = append(jsonscan.AppendQuoted(o.dst, name), ':')
}

func (o *object) raw(name string, value []byte) {
	o.key(name)
	o.dst = append(o.dst, value...)
}

func (o *object) text(name, value string) {
	o.key(name)
	o.dst = jsonscan.AppendQuoted(o.dst, value)
}

func (o *object) number(name string, value int) {
	o.key(name)
	o.dst = strconv.AppendInt(o.dst, int64(value), 10)
}

// maxBodySize returns an upper bound for the body in any dialect. size is the request's size as
// received. Only a JSON schema may grow: written as text it has a backslash before each quote.
func (r *request) maxBodySize(size int) int {
	const names = 512 // members that the router adds, and longer names
	return size + len(r.vals[fGuided]) + names
}

// appendBody writes the request in a dialect. It fails with *FieldError if the dialect has no
// member for a field.
func (r *request) appendBody(dst []byte, p modelPool) ([]byte, error) {
	o := object{dst: append(dst, '{')}
	prompt := "prompt"
	switch p.dialect {
	case generate:
		prompt = "token_ids"
	case native:
		prompt = "input_ids"
	}
	model := r.model
	lora := r.text(fLoRA)
	if lora != "" && p.dialect != native {
		model = lora // these engines select an adapter by the model's name
	}
	if model != "" {
		o.text("model", model)
	}
	o.raw(prompt, r.vals[fTokenIDs])
	o.raw("stream", jsonTrue)
	var err error
	switch p.dialect {
	case native:
		o.key("sampling_params")
		inner := object{dst: append(o.dst, '{')}
		if err = r.writeSampling(&inner, p); err != nil {
			return nil, err
		}
		o.dst = append(inner.dst, '}')
		if r.has(fLogprobs) {
			o.raw("return_logprob", jsonTrue)
			o.raw("top_logprobs_num", r.vals[fLogprobs])
		}
		if lora != "" {
			o.text("lora_path", lora)
		}
	case generate:
		o.raw("stream_options", includeUsage)
		o.key("sampling_params")
		inner := object{dst: append(o.dst, '{')}
		if err = r.writeSampling(&inner, p); err != nil {
			return nil, err
		}
		o.dst = append(inner.dst, '}')
	case completions, trtllm:
		o.raw("stream_options", includeUsage)
		if p.dialect == trtllm { // without detokenization it returns ids; it rejects unknown members
			o.raw("detokenize", jsonFalse)
			r.hints.ReturnsTokenIDs = true
		} else {
			o.raw("return_token_ids", jsonTrue)
			if r.has(fLogprobs) {
				o.raw("return_tokens_as_token_ids", jsonTrue)
			}
		}
		if err = r.writeSampling(&o, p); err != nil {
			return nil, err
		}
	}
	if r.has(fCacheSalt) {
		if p.dialect == trtllm {
			return nil, unsupported(fCacheSalt, p)
		}
		o.raw("cache_salt", r.vals[fCacheSalt])
	}
	if r.has(fPriority) && p.dialect != trtllm {
		o.raw("priority", r.vals[fPriority])
	}
	if err := r.writePrefillResult(&o, p); err != nil {
		return nil, err
	}
	for _, m := range r.engineFields {
		o.raw(string(m.name), m.raw)
	}
	return append(o.dst, '}'), nil
}

var (
	jsonTrue     = []byte("true")
	jsonFalse    = []byte("false")
	includeUsage = []byte(`{"include_usage":true}`)
)

// writeSampling writes the sampling members.
func (r *request) writeSampling(o *object, p modelPool) error {
	for _, n := range samplingNames {
		raw := r.vals[n.f]
		if raw == nil {
			continue
		}
		name := n.in(p.dialect)
		switch {
		case n.f == fGuided && (p.dialect == native || p.dialect == trtllm):
			if err := r.writeGuided(o, p.dialect); err != nil {
				return err
			}
		case n.f == fTopK && p.dialect == trtllm && string(raw) == "-1": // TensorRT-LLM's value for "no limit" is 0, the default
		case n.f == fTopK && p.dialect == native && string(raw) == "0": // SGLang's value for "no limit" is -1
			o.raw(name, []byte("-1"))
		case n.f == fBeam && p.dialect == generate && string(raw) != "false", name == "" && ignorableFields[n.f] != string(raw):
			return unsupported(n.f, p)
		case name != "":
			o.raw(name, raw)
		}
	}
	most := "max_tokens"
	if p.dialect == native {
		most = "max_new_tokens"
	}
	switch {
	case r.has(fMaxTokens):
		o.raw(most, r.vals[fMaxTokens])
	case p.maxLen > len(r.tokens):
		o.number(most, p.maxLen-len(r.tokens)) // an engine's own default is 16 or 128
	case p.maxLen > 0:
		return &FieldError{Field: "token_ids", Got: strconv.Itoa(len(r.tokens)) + " ids", Want: "fewer than " + strconv.Itoa(p.maxLen) + ", the model's maximum length"}
	default:
		return &FieldError{Field: "stop_conditions.max_tokens", Got: "nothing, and the model's length is not known", Want: rules[fMaxTokens].want}
	}
	if p.dialect != native && r.has(fLogprobs) {
		o.raw("logprobs", r.vals[fLogprobs])
	}
	r.writeStopIDs(o)
	for _, m := range r.sampling {
		o.raw(string(m.name), m.raw)
	}
	return nil
}

// unsupported returns the error for a field that the engine's API cannot express.
func unsupported(f field, p modelPool) error {
	return &FieldError{Field: rules[f].in + rules[f].name, Got: "the engine that serves this model has no such thing at " + endpoints[p.dialect].Path}
}

// writeStopIDs writes all token ids that end the answer.
func (r *request) writeStopIDs(o *object) {
	from := [...]field{fStopIDs, fStopIDsVisible, fStopIDsHidden, fEOS}
	n := len(from)
	if r.isTrue(fIgnoreEOS) {
		n--
	}
	opened := false
	for _, f := range from[:n] {
		inner := bytes.TrimSpace(bytes.Trim(r.vals[f], "[]"))
		if len(inner) == 0 {
			continue
		}
		if !opened {
			o.key("stop_token_ids")
			o.dst = append(o.dst, '[')
			opened = true
		} else {
			o.dst = append(o.dst, ',')
		}
		o.dst = append(o.dst, inner...)
	}
	if opened {
		o.dst = append(o.dst, ']')
	}
}

// writeGuided writes guided_decoding with the member names of SGLang and TensorRT-LLM.
func (r *request) writeGuided(o *object, d engineDialect) error {
	var room [32]byte
	first := ""
	for it := jsonscan.Walk(r.vals[fGuided]); it.Next(); {
		name := string(it.Key(room[:0]))
		if it.Value.Kind <= jsonscan.Null || name == "backend" {
			continue
		}
		if first != "" {
			return &FieldError{Field: "sampling_options.guided_decoding." + name, Got: first + " beside it", Want: "one of them"}
		}
		first = name
		words, ok := grammars[name]
		if !ok {
			return &FieldError{Field: "sampling_options.guided_decoding." + name, Got: "the engine that serves this model has no such thing; it has json, regex and grammar"}
		}
		raw := it.Raw()
		if d == trtllm {
			if name == "json" && it.Value.Kind == jsonscan.String { // a schema as text
				raw = appendText(nil, raw)
				if _, _, err := jsonscan.Find(raw, ""); err != nil {
					return &FieldError{Field: "sampling_options.guided_decoding.json", Got: err.Error(), Want: "a JSON schema, an object"}
				}
			}
			o.key("response_format")
			inner := object{dst: append(o.dst, '{')}
			inner.text("type", words.kind)
			inner.raw(words.trtllm, raw)
			o.dst = append(inner.dst, '}')
			continue
		}
		if name == "json" && it.Value.Kind != jsonscan.String {
			o.text(words.sglang, string(raw))
		} else {
			o.raw(words.sglang, raw)
		}
	}
	return nil
}

// grammars maps the members of guided_decoding to those of SGLang's sampling_params and of
// TensorRT-LLM's response_format.
var grammars = map[string]struct{ sglang, kind, trtllm string }{
	"json": {"json_schema", "json", "schema"}, "regex": {"regex", "regex", "regex"}, "grammar": {"ebnf", "ebnf", "ebnf"},
}

// writePrefillResult writes the members that a decode request needs when the caller has run the
// prefill.
func (r *request) writePrefillResult(o *object, p modelPool) error {
	if r.has(fBootstrap) {
		if p.dialect != native {
			return &FieldError{Field: "bootstrap_info", Got: "the engine that serves this model is not SGLang"}
		}
		o.raw("bootstrap_host", r.vals[fBootstrapHost])
		o.raw("bootstrap_port", r.vals[fBootstrapPort])
		o.raw("bootstrap_room", r.vals[fBootstrapRoom])
		return nil
	}
	if !r.has(fResultParams) {
		return nil
	}
	raw := r.vals[fResultParams]
	v, wrapped, _ := jsonscan.Find(raw, "kv_transfer_params")
	switch {
	case p.dialect == native:
		for _, name := range [...]string{"bootstrap_host", "bootstrap_port", "bootstrap_room"} {
			v, ok, _ := jsonscan.Find(raw, name)
			if !ok || v.Kind <= jsonscan.Null {
				return &FieldError{Field: "prefill_result.disaggregated_params." + name, Got: "nothing", Want: "what SGLang's hand-over needs"}
			}
			o.raw(name, raw[v.Start:v.End])
		}
	case p.dialect == trtllm:
		o.raw("disaggregated_params", raw)
	case wrapped && v.Kind == jsonscan.Object:
		o.raw("kv_transfer_params", raw[v.Start:v.End])
	default:
		return &FieldError{Field: "prefill_result.disaggregated_params", Got: quoteValue(raw, jsonscan.Object), Want: `an object with "kv_transfer_params", an object`}
	}
	return nil
}
