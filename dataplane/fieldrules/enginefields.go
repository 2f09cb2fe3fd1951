package fieldrules

import (
	"bytes"
	"iter"
	"net/netip"
	"strconv"
	"strings"
	"unsafe"

	"sluice/dataplane/jsonscan"
)

// fieldRule says what a client may write into a member that an engine acts on.
type fieldRule uint8

const (
	// routerOnly members may be written by the router alone. A client's is refused, or
	// removed from the body with StripForbidden. null passes.
	routerOnly fieldRule = iota
	// mediaSource members name the place of an image, a clip or a tool, at any depth: a
	// string, an object with a url, or an array of these. A data: URL passes, an http URL
	// passes if its host is one of MediaHosts, and anything else (file:, a path) is refused.
	mediaSource
	// mediaURL members are mediaSource members if the type of their object names media.
	mediaURL
	// requestName members are ids by which an engine knows the request.
	requestName
	// loaderArguments members hold arguments that an engine passes to the function that loads a
	// processor. Numbers, true, false and null pass, at any depth, but not in loaderOptions.
	loaderArguments
)

// engineField is one row of the table of members that an engine reads as an address, a file or
// the name of a request. Every other member is data to every engine release that
// testdata/engine_fields.tsv lists.
type engineField struct {
	name    string
	key     jsonscan.Key // of routerOnly and requestName members; noKey: none
	rule    fieldRule
	engines string // that read it
	effect  string // of a client's value on such an engine
}

const noKey = jsonscan.NumKeys

var engineFields = []engineField{
	{"kv_transfer_params", jsonscan.KeyKVTransferParams, routerOnly, "vLLM", "connects to remote_host and remote_port, reads and frees blocks there"},
	{"ec_transfer_params", jsonscan.KeyECTransferParams, routerOnly, "vLLM", "connects to the encoder that it names"},
	{"disagg_prefill_resp", jsonscan.KeyDisaggPrefillResp, routerOnly, "LMCache", "takes it for the prefill engine's answer"},
	{"bootstrap_host", jsonscan.KeyBootstrapHost, routerOnly, "SGLang", "connects to it"},
	{"bootstrap_port", jsonscan.KeyBootstrapPort, routerOnly, "SGLang", "connects to it"},
	{"bootstrap_room", jsonscan.KeyBootstrapRoom, routerOnly, "SGLang", "joins another request's transfer"},
	{"bootstrap_pair_key", jsonscan.KeyBootstrapPairKey, routerOnly, "SGLang", "joins another request's transfer"},
	{"disaggregated_params", jsonscan.KeyDisaggregatedParams, routerOnly, "TensorRT-LLM", "connects to ctx_info_endpoint and what encoded_opaque_state holds"},
	{"lora_request", jsonscan.KeyLoRARequest, routerOnly, "TensorRT-LLM", "loads an adapter from lora_path"},
	{"encoder_urls", jsonscan.KeyEncoderURLs, routerOnly, "SGLang /generate", "connects to each"},
	{"http_worker_ipc", jsonscan.KeyHTTPWorkerIPC, routerOnly, "SGLang /generate", "connects its output to that socket"},

	{"kv_hints", jsonscan.KeyKVHints, routerOnly, "SGLang /generate", "follows it as its orchestrator's"},

	{"request_id", jsonscan.KeyRequestID, requestName, "vLLM", "P2pNccl and MoRIIO connect to the peers in it; /v1/responses stores the answer under it"},
	{"rid", noKey, requestName, "SGLang", "is the id by which it is aborted"},

	{"image_url", noKey, mediaSource, "all", "fetches it, or opens the file"},
	{"video_url", noKey, mediaSource, "all", "fetches it, or opens the file"},
	{"audio_url", noKey, mediaSource, "all", "fetches it, or opens the file"},
	{"file_url", noKey, mediaSource, "Responses API", "fetches it"},
	{"server_url", noKey, mediaSource, "Responses API, MCP tools", "connects to it"},
	{"input_image", noKey, mediaSource, "SGLang", "fetches it, or opens the file"},
	{"input_video", noKey, mediaSource, "SGLang", "fetches it, or opens the file"},
	{"input_audio", noKey, mediaSource, "SGLang", "fetches it, or opens the file"},
	{"image", noKey, mediaSource, "SGLang embeddings, chat templates", "fetches it, or opens the file"},
	{"video", noKey, mediaSource, "SGLang embeddings, chat templates", "fetches it, or opens the file"},
	{"audio", noKey, mediaSource, "SGLang embeddings, chat templates", "fetches it, or opens the file"},
	{"images", noKey, mediaSource, "Ollama's API", "fetches them, or opens the files"},
	{"videos", noKey, mediaSource, "multimodal processors", "fetches them, or opens the files"},
	{"audios", noKey, mediaSource, "multimodal processors", "fetches them, or opens the files"},
	{"image_data", noKey, mediaSource, "SGLang /generate", "fetches it, or opens the file"},
	{"video_data", noKey, mediaSource, "SGLang /generate", "fetches it, or opens the file"},
	{"audio_data", noKey, mediaSource, "SGLang /generate", "fetches it, or opens the file"},
	{"url", noKey, mediaURL, "Anthropic's sources, chat templates", "fetches it"},

	{"mm_processor_kwargs", noKey, loaderArguments, "vLLM, SGLang, TensorRT-LLM", "passes it to from_pretrained, which reads cache_dir, proxies and token from it"},
}

// EngineFields returns the name of every member that an engine reads as an address, a file or
// the name of a request, and whether only the router may write it. An entrance that reads another
// format than engines' bodies refuses these members by it.
func EngineFields() iter.Seq2[string, bool] {
	return func(yield func(name string, onlyRouter bool) bool) {
		for i := range engineFields {
			if f := &engineFields[i]; !yield(f.name, f.rule == routerOnly) {
				return
			}
		}
	}
}

// vllmNestedObjects are the objects in which vLLM looks for its routerOnly members. They are
// refused there even with StripForbidden, because no honest client writes them there.
var vllmNestedObjects = [...]jsonscan.Key{jsonscan.KeyVLLMXArgs, jsonscan.KeySamplingExtraArgs}

// isOpaqueMember reports whether engines do not act on the content of a member: the arguments
// and schemas of tools, a client's metadata.
func isOpaqueMember(name []byte, depth int) bool {
	switch string(name) {
	case "arguments", "parameters", "input_schema", "json_schema", "schema", "metadata", "chat_template_kwargs", "structured_outputs", "logit_bias":
		return true
	case "input":
		return depth > 1 // the arguments of a tool; at the top it is the Responses API's prompt
	}
	return false
}

// isLoaderOption reports whether name, in lower case, is an option of Hugging Face's from_pretrained
// that says from where to load, or whether to run code that comes with a model.
func isLoaderOption(name []byte) bool {
	switch string(name) {
	case "cache_dir", "code_revision", "force_download", "local_files_only", "mirror", "proxies", "resume_download",
		"revision", "subfolder", "token", "trust_remote_code", "use_auth_token":
		return true
	}
	return false
}

// maxMediaURL is the longest accepted URL that is not a data: URL, in bytes of the body.
const maxMediaURL = 8 << 10

// MediaHosts are the hosts from which engines may fetch media that clients name: DNS names,
// "*.example.com" for all names below one, IP addresses, and "*" for any host.
type MediaHosts []string

// allows reports whether m contains host, which has no port.
func (m MediaHosts) allows(host string) bool {
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	for _, h := range m {
		switch {
		case h == "*", strings.EqualFold(h, host):
			return true
		case strings.HasPrefix(h, "*.") && len(host) > len(h)-1 && strings.HasSuffix(host, strings.ToLower(h[1:])):
			return true
		}
	}
	return false
}

// Refusal is a refused member of a body.
type Refusal struct {
	path      []string // innermost name first
	Forbidden bool     // a client may not send it; else it is malformed
	Message   string   // what is wrong, to follow the name of the member
}

// within adds the name of an enclosing member to the path. It does nothing if b is nil.
func (b *Refusal) within(name string) *Refusal {
	if b != nil {
		b.path = append(b.path, name)
	}
	return b
}

// Field returns the path of the member, such as messages.0.content.1.image_url.
func (b *Refusal) Field() string {
	var out strings.Builder
	for i := len(b.path) - 1; i >= 0; i-- {
		if out.Len() > 0 {
			out.WriteByte('.')
		}
		out.WriteString(b.path[i])
	}
	return out.String()
}

// Check applies the rules that every entrance shares, HTTP or another: all of engineFields but the
// routerOnly members at the top, which some entrances remove. It returns the first refused member, nil
// if there is none.
func Check(d *jsonscan.Doc, hosts MediaHosts) *Refusal {
	bad := checkNested(d)
	if bad == nil && d.Has(jsonscan.KeyRequestID) {
		s := fieldScan{b: d.Raw(jsonscan.KeyRequestID)}
		s.requestNames()
		bad = s.field().within("request_id")
	}
	if bad == nil && d.MayBeSensitive {
		bad = checkMembers(d.Body, hosts)
	}
	return bad
}

// RouterOnlyMember returns the name of the first routerOnly member at the top of d, "" if there is
// none.
func RouterOnlyMember(d *jsonscan.Doc) string {
	for i := range engineFields {
		if f := &engineFields[i]; f.rule == routerOnly && f.key != noKey && d.Has(f.key) {
			return f.name
		}
	}
	return ""
}

// MaxRemovals is the greatest number of edits that AppendRemovals appends.
const MaxRemovals = 16

// AppendRemovals appends the edits that remove the routerOnly members at the top of d and, with names,
// its ids of a request.
func AppendRemovals(edits []jsonscan.Edit, d *jsonscan.Doc, names bool) []jsonscan.Edit {
	for i := range engineFields {
		f := &engineFields[i]
		if f.key != noKey && d.Has(f.key) && (f.rule == routerOnly || f.rule == requestName && names) {
			edits = append(edits, jsonscan.Edit{Key: f.key, Op: jsonscan.Remove})
		}
	}
	return edits
}

// RouterOnlyMessage says why a routerOnly member is refused.
const RouterOnlyMessage = "is set by the router and may not be sent by a client; leave it out"

func checkNested(d *jsonscan.Doc) *Refusal {
	for _, in := range vllmNestedObjects {
		if !d.Has(in) {
			continue
		}
		if bad := checkRouterOnly(d.Raw(in)); bad != nil {
			return bad.within(in.Name())
		}
	}
	if d.Has(jsonscan.KeySamplingParams) && d.Values[jsonscan.KeySamplingParams].Kind == jsonscan.Array {
		n := 0
		for it := jsonscan.Walk(d.Raw(jsonscan.KeySamplingParams)); it.Next(); n++ {
			var extra [1]jsonscan.Value
			jsonscan.Members(it.Raw(), extra[:], "extra_args")
			if bad := checkRouterOnly(it.Raw()[extra[0].Start:extra[0].End]); bad != nil {
				return bad.within("extra_args").within(strconv.Itoa(n)).within(jsonscan.KeySamplingParams.Name())
			}
		}
	}
	return nil
}

// checkRouterOnly returns the first routerOnly member of an object, nil if there is none.
func checkRouterOnly(object []byte) *Refusal {
	for it := jsonscan.Walk(object); it.Next(); {
		for i := range engineFields {
			f := &engineFields[i]
			if f.rule == routerOnly && it.Value.Kind > jsonscan.Null && it.IsKey(f.name) {
				return (&Refusal{Forbidden: true, Message: RouterOnlyMessage}).within(f.name)
			}
		}
	}
	return nil
}

// checkMembers checks the members of a body at every depth.
func checkMembers(body []byte, hosts MediaHosts) *Refusal {
	s := fieldScan{b: body, hosts: hosts}
	s.skipSpace()
	s.value(false, 1)
	return s.field()
}

// CheckMember checks a member that a caller sends to engines by another way than an HTTP
// body, by the rules for bodies' members: depth is 1 for one at the top. It returns the path
// below the member and what is wrong there, "" and "" when nothing is; forbidden: the value
// is not the caller's to send.
func CheckMember(name, value []byte, depth int, hosts MediaHosts) (below, why string, forbidden bool) {
	s := fieldScan{b: value, hosts: hosts}
	s.skipSpace()
	switch ruleOf(bytes.ToLower(name[:min(len(name), maxRuledName)]), s.peek(), depth) {
	case ruleOpaque:
	case ruleName:
		s.requestNames()
	case ruleArguments:
		s.arguments()
	case ruleMedia:
		s.bad = s.bad.first(s.value(true, depth+1))
	default:
		s.value(false, depth+1)
	}
	bad := s.field()
	if bad == nil {
		return "", "", false
	}
	return bad.Field(), bad.Message, bad.Forbidden
}

// namesMedia reports whether the type of an object, a value in JSON, is a kind of media, whose
// url is fetched. A citation and the result of a search have a url as well, which no engine
// fetches.
func namesMedia(typ []byte) bool {
	if len(typ) < 2 || typ[0] != '"' || len(typ) > 6*len("input_image")+2 { // all of it escaped
		return false
	}
	var buf [maxRuledName]byte
	switch string(jsonscan.Unquote(buf[:0], typ)) {
	case "image", "video", "audio", "image_url", "video_url", "audio_url", "input_image", "input_video", "input_audio", "input_file":
		return true
	}
	return false
}

var dataScheme = []byte(`"data:`)

// urlProblem is why an engine may not fetch a URL.
type urlProblem uint8

const (
	urlAllowed urlProblem = iota
	urlTooLong
	urlScheme
	urlCharacter
	urlHost
	urlForbiddenHost
)

// urlVerdict is a urlProblem and the part of the URL that has it, which is borrowed.
type urlVerdict struct {
	why  urlProblem
	part []byte
}

func (v urlVerdict) message() string {
	const use = "send the content as a data: URL"
	switch v.why {
	case urlTooLong:
		return "is neither a data: URL nor one of at most 8 KiB; " + use
	case urlScheme:
		return "names no http or https URL (" + quoted(v.part) + "): an engine may open a file of that name; " + use
	case urlCharacter:
		return "holds a URL with a space, a backslash or a character beyond ASCII; percent-encode it, or " + use
	case urlHost:
		return "holds a URL whose host " + quoted(v.part) + " is not a name or an address with an optional port; " + use
	case urlForbiddenHost:
		return "names a URL of host " + quoted(v.part) + ", from which engines may not fetch; " + use + ", or have the operator add the host to media_hosts"
	}
	return ""
}

// judgeURL decides whether an engine may fetch the URL in a JSON string. Only the plainest form
// of a URL is accepted: two parsers could read anything else as two different hosts. The
// text of the string is appended to buf and returned; the verdict borrows it.
func judgeURL(quoted, buf []byte, hosts MediaHosts) (urlVerdict, []byte) {
	switch {
	case bytes.HasPrefix(quoted, dataScheme), len(quoted) == 2:
		return urlVerdict{}, buf
	case len(quoted) > maxMediaURL:
		return urlVerdict{why: urlTooLong}, buf
	}
	buf = jsonscan.Unquote(buf, quoted)
	text := unsafe.String(unsafe.SliceData(buf), len(buf))
	if strings.HasPrefix(text, "data:") {
		return urlVerdict{}, buf
	}
	rest, ok := cutPrefixFold(text, "http://")
	if !ok {
		rest, ok = cutPrefixFold(text, "https://")
	}
	if !ok {
		return urlVerdict{urlScheme, buf}, buf
	}
	for i := range len(rest) {
		if b := rest[i]; b <= ' ' || b >= 0x7f || b == '\\' {
			return urlVerdict{why: urlCharacter}, buf
		}
	}
	host := rest
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		host = rest[:end]
	}
	name, ok := hostName(host)
	switch {
	case !ok:
		return urlVerdict{urlHost, []byte(host)}, buf
	case !hosts.allows(name):
		return urlVerdict{urlForbiddenHost, []byte(name)}, buf
	}
	return urlVerdict{}, buf
}

// cutPrefixFold is strings.CutPrefix of a prefix in any case.
func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// hostName returns the host of a URL's authority without its port. It returns false if the
// authority has a user part or is malformed.
func hostName(authority string) (string, bool) {
	name, port := authority, ""
	if at := strings.LastIndexByte(authority, ':'); at >= 0 && !strings.HasSuffix(authority, "]") {
		name, port = authority[:at], authority[at+1:]
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return "", false
		}
	}
	if strings.HasPrefix(name, "[") && strings.HasSuffix(name, "]") {
		addr, err := netip.ParseAddr(name[1 : len(name)-1])
		return addr.String(), err == nil && addr.Zone() == ""
	}
	for i := range len(name) {
		b := name[i]
		if b|0x20 < 'a' || b|0x20 > 'z' {
			if (b < '0' || b > '9') && b != '-' && b != '.' && b != '_' {
				return "", false
			}
		}
	}
	return name, name != ""
}

// isRequestName reports whether a JSON string may be the id of a request.
func isRequestName(quoted []byte) bool {
	if len(quoted) > 6*maxRequestID+2 { // all of it escaped
		return false
	}
	var buf [6 * maxRequestID]byte
	return ValidRequestID(jsonscan.Unquote(buf[:0], quoted))
}

func requestNameMessage(raw []byte) string {
	return "must be 1 to 128 visible ASCII characters without quotes and backslashes, and name no peer, got " + quoted(raw)
}

// quoted quotes up to 80 bytes of a client's input for an error message.
func quoted(b []byte) string {
	if len(b) > 80 {
		return `"` + string(b[:80]) + `…"`
	}
	return `"` + string(b) + `"`
}
