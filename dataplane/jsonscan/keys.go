package jsonscan

// Key is a member of a request body that the router knows by name.
type Key uint8

// The known top-level members, and the nested ones of sampling_params.
const (
	KeyModel Key = iota
	KeyStream
	KeyStreamOptions
	KeyN
	KeyMaxTokens
	KeyMaxCompletionTokens
	KeyMaxOutputTokens
	KeyMinTokens
	KeyMinCompletionTokens
	KeyPrompt
	KeyMessages
	KeyInput
	KeySystem
	KeyInstructions
	KeyTools
	KeyToolChoice
	KeyTokenIDs
	KeySamplingParams
	KeyCacheSalt
	KeyRequestID
	KeyReturnTokenIDs
	KeyChatTemplate
	KeyChatTemplateKwargs
	KeyAddGenerationPrompt
	KeyContinueFinalMessage
	KeyAddSpecialTokens
	KeyKVTransferParams
	KeyDisaggPrefillResp
	KeyBootstrapHost
	KeyBootstrapPort
	KeyBootstrapRoom
	KeyDisaggregatedParams
	KeyECTransferParams
	KeyBestOf
	KeyUseBeamSearch
	KeyVLLMXArgs
	KeyText                // SGLang's /generate; in /v1/responses the format of the answer
	KeyInputIDs            // SGLang's /generate
	KeyBootstrapPairKey    // SGLang's /generate
	KeyRoutedDPRank        // SGLang 0.5.10 and later
	KeyDisaggPrefillDPRank // SGLang 0.5.10 and later
	KeyDataParallelRank    // SGLang before 0.5.10
	KeyCacheHitThreshold
	KeyPromptTokenIDs // TensorRT-LLM, chat
	KeyEcho
	KeyIgnoreEOS
	KeyStop
	KeyStopTokenIDs
	KeyPromptLogprobs
	KeyThinking  // of /v1/messages, and of SGLang's chats
	KeyReasoning // of /v1/responses, and of SGLang's chats
	KeyReasoningEffort
	KeyLoRARequest          // TensorRT-LLM
	KeyEncoderURLs          // SGLang's /generate
	KeyHTTPWorkerIPC        // SGLang's /generate
	KeyKVHints              // SGLang's /generate
	KeyLoRAPath             // SGLang: the adapter, beside the model
	KeyLoRAID               // SGLang: the adapter by its internal id
	KeyPreviousResponseID   // of /v1/responses
	KeyBackground           // of /v1/responses
	KeyReturnLogprob        // SGLang's /generate
	KeyPromptCacheKey       // OpenAI: requests with one value share a prefix
	KeyUser                 // OpenAI: the end user
	KeyReturnPromptText     // vLLM: the answer has the rendered prompt
	KeySamplingMaxTokens    // sampling_params.max_tokens
	KeySamplingMinTokens    // sampling_params.min_tokens
	KeySamplingN            // sampling_params.n
	KeySamplingExtraArgs    // sampling_params.extra_args
	KeySamplingMaxNewTokens // sampling_params.max_new_tokens
	KeySamplingPromptLogprobs
	NumKeys
)

// noKey stands for an unknown member.
const noKey = NumKeys

// Name returns the member's name, dotted for a nested one.
func (k Key) Name() string {
	if k >= NumKeys {
		return ""
	}
	return members[k].name
}

// nested reports whether k is a member of sampling_params.
func (k Key) nested() bool { return k >= KeySamplingMaxTokens }

// Kind is the JSON type of a value.
type Kind uint8

// The kinds. Absent: there is no such member.
const (
	Absent Kind = iota
	Null
	Bool
	Number
	String
	Array
	Object
)

var kindNames = [...]string{"absent", "null", "boolean", "number", "string", "array", "object"}

// String returns the kind's name in JSON.
func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return "unknown"
}

// kinds is a set of Kind, one bit each.
type kinds uint8

const (
	null    kinds = 1 << Null
	boolean kinds = 1 << Bool
	number  kinds = 1 << Number
	str     kinds = 1 << String
	array   kinds = 1 << Array
	object  kinds = 1 << Object
	anyKind       = null | boolean | number | str | array | object
)

// member is what a scan requires of a known member.
type member struct {
	name    string
	allowed kinds
	count   bool   // a number must be an integer
	want    string // for the error message
	splice  string // the key as Set writes it: `,"name":`
}

// countRange is what a counting member accepts.
const countRange = "an integer from -9223372036854775808 to 9223372036854775807, or null"

var members = makeMembers()

func makeMembers() (m [NumKeys]member) {
	def := func(k Key, name string, allowed kinds, want string) {
		last := name
		for i := range name {
			if name[i] == '.' {
				last = name[i+1:]
			}
		}
		m[k] = member{name: name, allowed: allowed, want: want, splice: `,"` + last + `":`}
	}
	flag := func(k Key, name string) { def(k, name, boolean|null, "true or false") }
	count := func(k Key, name string) { def(k, name, number|null, "an integer or null"); m[k].count = true }
	text := func(k Key, name string) { def(k, name, str|null, "a string or null") }
	anyOf := func(k Key, name string) { def(k, name, anyKind, "a JSON value") }

	def(KeyModel, "model", str|null, "a string, the model's name, or null")
	flag(KeyStream, "stream")
	def(KeyStreamOptions, "stream_options", object|null, "an object or null")
	count(KeyN, "n")
	count(KeyMaxTokens, "max_tokens")
	count(KeyMaxCompletionTokens, "max_completion_tokens")
	count(KeyMaxOutputTokens, "max_output_tokens")
	count(KeyMinTokens, "min_tokens")
	count(KeyMinCompletionTokens, "min_completion_tokens")
	def(KeyPrompt, "prompt", str|array|null, "a string, an array of strings, of token ids or of arrays of them, or null")
	def(KeyMessages, "messages", array, "an array of messages")
	def(KeyInput, "input", str|array|object|null, "a string or an array")
	def(KeySystem, "system", str|array|null, "a string or an array of content blocks")
	def(KeyInstructions, "instructions", str|array|null, "a string or null")
	def(KeyTools, "tools", array|null, "an array of tools or null")
	anyOf(KeyToolChoice, "tool_choice")
	def(KeyTokenIDs, "token_ids", array, "an array of token ids")
	def(KeySamplingParams, "sampling_params", object|array|null, "an object, an array of them, or null")
	text(KeyCacheSalt, "cache_salt")
	text(KeyRequestID, "request_id")
	flag(KeyReturnTokenIDs, "return_token_ids")
	text(KeyChatTemplate, "chat_template")
	def(KeyChatTemplateKwargs, "chat_template_kwargs", object|null, "an object or null")
	flag(KeyAddGenerationPrompt, "add_generation_prompt")
	flag(KeyContinueFinalMessage, "continue_final_message")
	flag(KeyAddSpecialTokens, "add_special_tokens")
	anyOf(KeyKVTransferParams, "kv_transfer_params")
	anyOf(KeyDisaggPrefillResp, "disagg_prefill_resp")
	anyOf(KeyBootstrapHost, "bootstrap_host")
	anyOf(KeyBootstrapPort, "bootstrap_port")
	anyOf(KeyBootstrapRoom, "bootstrap_room")
	anyOf(KeyDisaggregatedParams, "disaggregated_params")
	anyOf(KeyECTransferParams, "ec_transfer_params")
	count(KeyBestOf, "best_of")
	flag(KeyUseBeamSearch, "use_beam_search")
	def(KeyVLLMXArgs, "vllm_xargs", object|null, "an object or null")
	def(KeyText, "text", str|array|object|null, "a string, an array of strings, an object (/v1/responses), or null")
	def(KeyInputIDs, "input_ids", array|null, "an array of token ids or of arrays of them, or null")
	anyOf(KeyBootstrapPairKey, "bootstrap_pair_key")
	anyOf(KeyRoutedDPRank, "routed_dp_rank")
	anyOf(KeyDisaggPrefillDPRank, "disagg_prefill_dp_rank")
	anyOf(KeyDataParallelRank, "data_parallel_rank")
	anyOf(KeyCacheHitThreshold, "cache_hit_threshold")
	anyOf(KeyPromptTokenIDs, "prompt_token_ids")
	anyOf(KeyEcho, "echo")
	anyOf(KeyIgnoreEOS, "ignore_eos")
	anyOf(KeyStop, "stop")
	anyOf(KeyStopTokenIDs, "stop_token_ids")
	anyOf(KeyPromptLogprobs, "prompt_logprobs")
	anyOf(KeyThinking, "thinking")
	anyOf(KeyReasoning, "reasoning")
	anyOf(KeyReasoningEffort, "reasoning_effort")
	anyOf(KeyLoRARequest, "lora_request")
	anyOf(KeyEncoderURLs, "encoder_urls")
	anyOf(KeyHTTPWorkerIPC, "http_worker_ipc")
	anyOf(KeyKVHints, "kv_hints")
	anyOf(KeyLoRAPath, "lora_path")
	anyOf(KeyLoRAID, "lora_id")
	text(KeyPreviousResponseID, "previous_response_id")
	flag(KeyBackground, "background")
	anyOf(KeyReturnLogprob, "return_logprob")
	anyOf(KeyPromptCacheKey, "prompt_cache_key")
	anyOf(KeyUser, "user")
	anyOf(KeyReturnPromptText, "return_prompt_text")
	count(KeySamplingMaxTokens, "sampling_params.max_tokens")
	count(KeySamplingMinTokens, "sampling_params.min_tokens")
	count(KeySamplingN, "sampling_params.n")
	def(KeySamplingExtraArgs, "sampling_params.extra_args", object|null, "an object or null")
	count(KeySamplingMaxNewTokens, "sampling_params.max_new_tokens")
	anyOf(KeySamplingPromptLogprobs, "sampling_params.prompt_logprobs")
	return m
}

// maxNameLen bounds the unescaped length of a known name.
const maxNameLen = 24

// topKey returns the known top-level member called name, or noKey. A switch on a converted slice
// compiles to comparisons without a copy.
func topKey(name []byte) Key {
	switch string(name) {
	case "model":
		return KeyModel
	case "stream":
		return KeyStream
	case "stream_options":
		return KeyStreamOptions
	case "n":
		return KeyN
	case "max_tokens":
		return KeyMaxTokens
	case "max_completion_tokens":
		return KeyMaxCompletionTokens
	case "max_output_tokens":
		return KeyMaxOutputTokens
	case "min_tokens":
		return KeyMinTokens
	case "min_completion_tokens":
		return KeyMinCompletionTokens
	case "prompt":
		return KeyPrompt
	case "messages":
		return KeyMessages
	case "input":
		return KeyInput
	case "system":
		return KeySystem
	case "instructions":
		return KeyInstructions
	case "tools":
		return KeyTools
	case "tool_choice":
		return KeyToolChoice
	case "token_ids":
		return KeyTokenIDs
	case "sampling_params":
		return KeySamplingParams
	case "cache_salt":
		return KeyCacheSalt
	case "request_id":
		return KeyRequestID
	case "return_token_ids":
		return KeyReturnTokenIDs
	case "chat_template":
		return KeyChatTemplate
	case "chat_template_kwargs":
		return KeyChatTemplateKwargs
	case "add_generation_prompt":
		return KeyAddGenerationPrompt
	case "continue_final_message":
		return KeyContinueFinalMessage
	case "add_special_tokens":
		return KeyAddSpecialTokens
	case "kv_transfer_params":
		return KeyKVTransferParams
	case "disagg_prefill_resp":
		return KeyDisaggPrefillResp
	case "bootstrap_host":
		return KeyBootstrapHost
	case "bootstrap_port":
		return KeyBootstrapPort
	case "bootstrap_room":
		return KeyBootstrapRoom
	case "disaggregated_params":
		return KeyDisaggregatedParams
	case "ec_transfer_params":
		return KeyECTransferParams
	case "best_of":
		return KeyBestOf
	case "use_beam_search":
		return KeyUseBeamSearch
	case "vllm_xargs":
		return KeyVLLMXArgs
	case "text":
		return KeyText
	case "input_ids":
		return KeyInputIDs
	case "bootstrap_pair_key":
		return KeyBootstrapPairKey
	case "routed_dp_rank":
		return KeyRoutedDPRank
	case "disagg_prefill_dp_rank":
		return KeyDisaggPrefillDPRank
	case "data_parallel_rank":
		return KeyDataParallelRank
	case "cache_hit_threshold":
		return KeyCacheHitThreshold
	case "prompt_token_ids":
		return KeyPromptTokenIDs
	case "echo":
		return KeyEcho
	case "ignore_eos":
		return KeyIgnoreEOS
	case "stop":
		return KeyStop
	case "stop_token_ids":
		return KeyStopTokenIDs
	case "prompt_logprobs":
		return KeyPromptLogprobs
	case "thinking":
		return KeyThinking
	case "reasoning":
		return KeyReasoning
	case "reasoning_effort":
		return KeyReasoningEffort
	case "previous_response_id":
		return KeyPreviousResponseID
	case "background":
		return KeyBackground
	case "return_logprob":
		return KeyReturnLogprob
	case "prompt_cache_key":
		return KeyPromptCacheKey
	case "user":
		return KeyUser
	case "return_prompt_text":
		return KeyReturnPromptText
	case "lora_request":
		return KeyLoRARequest
	case "encoder_urls":
		return KeyEncoderURLs
	case "http_worker_ipc":
		return KeyHTTPWorkerIPC
	case "kv_hints":
		return KeyKVHints
	case "lora_path":
		return KeyLoRAPath
	case "lora_id":
		return KeyLoRAID
	}
	return noKey
}

// samplingKey returns the known member of sampling_params called name, or noKey.
func samplingKey(name []byte) Key {
	switch string(name) {
	case "max_tokens":
		return KeySamplingMaxTokens
	case "min_tokens":
		return KeySamplingMinTokens
	case "n":
		return KeySamplingN
	case "extra_args":
		return KeySamplingExtraArgs
	case "max_new_tokens":
		return KeySamplingMaxNewTokens
	case "prompt_logprobs":
		return KeySamplingPromptLogprobs
	}
	return noKey
}
