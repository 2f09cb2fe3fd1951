package front

import (
	"bytes"
	"net/netip"
	"strconv"
	"strings"

	"sluice/dataplane/jsonscan"
)

// fieldRule is what a client may write into a member that an engine acts on.
type fieldRule uint8

const (
	// routerOnly members are written by the router alone. A client's is refused, or cut
	// out of the body where StripForbidden says so; null is harmless and passes.
	routerOnly fieldRule = iota
	// mediaSource members say where an image, a clip or a tool is: at any depth, as a
	// string, an object with a url, or an array of these. A data: URL passes, an http
	// URL if its host is one of MediaHosts, anything else (file:, a path) is refused.
	mediaSource
	// mediaURL members are mediaSource where their object has a type that names media.
	mediaURL
	// requestName members are ids that an engine knows the request by.
	requestName
)

// engineField is one row of the table of members that an engine takes for an address, for a
// file, or for the name of a request. What is not in the table is data to every engine
// release that testdata/engine_fields.tsv lists.
type engineField struct {
	name    string
	key     jsonscan.Key // of routerOnly and requestName members; NumKeys: none
	rule    fieldRule
	engines string // who reads it
	effect  string // what it would do with a client's value
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
}

// vllmNestedObjects are the objects in which vLLM looks for routerOnly members of its own. No honest
// client writes them there, so they are refused even where those at the top are cut.
var vllmNestedObjects = [...]jsonscan.Key{jsonscan.KeyVLLMXArgs, jsonscan.KeySamplingExtraArgs}

// isOpaqueMember are members whose content engines pass on without acting on it: the arguments and
// schemas of tools, a client's own notes.
func isOpaqueMember(name []byte, depth int) bool {
	switch string(name) {
	case "arguments", "parameters", "input_schema", "json_schema", "schema", "metadata", "chat_template_kwargs", "structured_outputs", "logit_bias":
		return true
	case "input":
		return depth > 1 // of a tool's use; at the top it is the Responses API's prompt
	}
	return false
}

// fieldDepth is how deep engines read what they fetch: the url of an image in a tool's result
// in a message stands eight levels down.
const fieldDepth = 12

// maxMediaURL is the longest URL that is looked at, in bytes as it stands in the body.
const maxMediaURL = 8 << 10

// MediaHosts are the hosts from which engines may fetch what clients name: DNS names,
// "*.example.com" for all below one, IP addresses, and "*" for any.
type MediaHosts []string

// allows says whether host, without its port, is one of those.
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

// badField is a member that a client may not have written so.
type badField struct {
	path    []string // innermost first
	reason  Reason
	message string
}

// within puts the member's place before what was found in it.
func (b *badField) within(name string) *badField {
	if b != nil {
		b.path = append(b.path, name)
	}
	return b
}

func (b *badField) name() string {
	var out strings.Builder
	for i := len(b.path) - 1; i >= 0; i-- {
		if out.Len() > 0 {
			out.WriteByte('.')
		}
		out.WriteString(b.path[i])
	}
	return out.String()
}

// checkFields looks at every member of the body that the table knows. When it refuses one, it
// has answered and gives false.
func (x *Exchange) checkFields() bool {
	d := &x.Doc
	bad := checkNested(d)
	if bad == nil && d.Has(jsonscan.KeyRequestID) {
		bad = checkRequestName(d.Raw(jsonscan.KeyRequestID)).within("request_id")
	}
	if bad == nil && d.MayBeSensitive {
		bad = checkMembers(d.Body, 1, x.srv.options().MediaHosts)
	}
	if bad == nil {
		return true
	}
	field := bad.name()
	x.Error(bad.reason, field, "field "+strconv.Quote(field)+" "+bad.message, 0)
	return false
}

const routerOnlyMessage = "is set by the router and may not be sent by a client; leave it out"

func checkNested(d *jsonscan.Doc) *badField {
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

// checkRouterOnly finds a member that only the router may write in an object.
func checkRouterOnly(object []byte) *badField {
	for it := jsonscan.Walk(object); it.Next(); {
		for i := range engineFields {
			f := &engineFields[i]
			if f.rule == routerOnly && it.Value.Kind > jsonscan.Null && it.IsKey(f.name) {
				return (&badField{reason: ForbiddenField, message: routerOnlyMessage}).within(f.name)
			}
		}
	}
	return nil
}

// checkMembers goes over an object or an array at depth, 1 being the body itself.
func checkMembers(raw []byte, depth int, hosts MediaHosts) *badField {
	if depth > fieldDepth {
		return nil
	}
	object := len(raw) > 0 && raw[0] == '{'
	media := object && namesMedia(raw)
	var scratch [32]byte
	n := 0
	for it := jsonscan.Walk(raw); it.Next(); n++ {
		switch {
		case object:
			name := it.Key(scratch[:0])
			if bad := checkMember(name, it.Raw(), it.Value.Kind, media, depth, hosts); bad != nil {
				return bad.within(string(name))
			}
		case it.Value.Kind >= jsonscan.Array:
			if bad := checkMembers(it.Raw(), depth+1, hosts); bad != nil {
				return bad.within(strconv.Itoa(n))
			}
		}
	}
	return nil
}

// checkMember looks at one member of an object at depth; media: the object's type is a kind
// of media.
func checkMember(name, value []byte, kind jsonscan.Kind, media bool, depth int, hosts MediaHosts) *badField {
	switch {
	case isOpaqueMember(name, depth):
	case string(name) == "rid":
		return checkRequestName(value)
	case string(name) == "url":
		if media {
			return checkMedia(value, depth, hosts)
		}
	case string(name) == "source" && kind == jsonscan.String:
		// A document's source is its title; Anthropic's is an object.
	case jsonscan.IsSensitive(name):
		return checkMedia(value, depth, hosts)
	case kind >= jsonscan.Array:
		return checkMembers(value, depth+1, hosts)
	}
	return nil
}

// CheckMember looks at a member that a caller hands to engines by another way than an HTTP
// body, by the rules for bodies' members: depth is 1 for one at the top. It returns the place
// below the member and what is wrong there, "" and "" when nothing is; forbidden: the value
// is not the caller's to send.
func CheckMember(name, value []byte, depth int, hosts MediaHosts) (below, why string, forbidden bool) {
	kind := jsonscan.Number // or another without members
	switch {
	case len(value) == 0:
	case value[0] == '"':
		kind = jsonscan.String
	case value[0] == '[':
		kind = jsonscan.Array
	case value[0] == '{':
		kind = jsonscan.Object
	}
	bad := checkMember(name, value, kind, false, depth, hosts)
	if bad == nil {
		return "", "", false
	}
	return bad.name(), bad.message, bad.reason == ForbiddenField
}

// namesMedia says whether an object's type is a kind of media, whose url is fetched. A
// citation and the result of a search have a url as well, which nobody does.
func namesMedia(object []byte) bool {
	var typ [1]jsonscan.Value
	jsonscan.Members(object, typ[:], "type")
	if typ[0].Kind != jsonscan.String || typ[0].End-typ[0].Start > 6*len("input_image")+2 { // all of it escaped
		return false
	}
	switch string(jsonscan.Unquote(nil, object[typ[0].Start:typ[0].End])) {
	case "image", "video", "audio", "image_url", "video_url", "audio_url", "input_image", "input_video", "input_audio", "input_file":
		return true
	}
	return false
}

// checkMedia looks at what names media: a string, an object with a url, or an array of these.
func checkMedia(raw []byte, depth int, hosts MediaHosts) *badField {
	if len(raw) == 0 || depth > fieldDepth {
		return nil
	}
	switch raw[0] {
	case '"':
		if why := refusedURL(raw, hosts); why != "" {
			return &badField{reason: ForbiddenField, message: why}
		}
	case '[':
		n := 0
		for it := jsonscan.Walk(raw); it.Next(); n++ {
			if bad := checkMedia(it.Raw(), depth+1, hosts); bad != nil {
				return bad.within(strconv.Itoa(n))
			}
		}
	case '{':
		for it := jsonscan.Walk(raw); it.Next(); {
			if it.IsKey("url") || it.IsKey("Url") { // as Dynamo's multi_modal_data has it
				if bad := checkMedia(it.Raw(), depth+1, hosts); bad != nil {
					return bad.within("url")
				}
			}
		}
		return checkMembers(raw, depth+1, hosts)
	}
	return nil
}

var dataScheme = []byte(`"data:`)

// refusedURL says why an engine may not fetch what a JSON string names; "" if it may. Only
// the plainest form of a URL is accepted: what two parsers could read as two hosts is not.
func refusedURL(quoted []byte, hosts MediaHosts) string {
	const use = "send the content as a data: URL"
	switch {
	case bytes.HasPrefix(quoted, dataScheme), len(quoted) == 2:
		return ""
	case len(quoted) > maxMediaURL:
		return "is neither a data: URL nor one of at most 8 KiB; " + use
	}
	text := string(jsonscan.Unquote(nil, quoted))
	if strings.HasPrefix(text, "data:") {
		return ""
	}
	rest, ok := cutPrefixFold(text, "http://")
	if !ok {
		rest, ok = cutPrefixFold(text, "https://")
	}
	if !ok {
		return "names no http or https URL (" + quotedForError([]byte(text)) + "): an engine may open a file of that name; " + use
	}
	for i := range len(rest) {
		if b := rest[i]; b <= ' ' || b >= 0x7f || b == '\\' {
			return "holds a URL with a space, a backslash or a character beyond ASCII; percent-encode it, or " + use
		}
	}
	host := rest
	if end := strings.IndexAny(rest, "/?#"); end >= 0 {
		host = rest[:end]
	}
	name, ok := hostName(host)
	if !ok {
		return "holds a URL whose host " + quotedForError([]byte(host)) + " is not a name or an address with an optional port; " + use
	}
	if !hosts.allows(name) {
		return "names a URL of host " + quotedForError([]byte(name)) + ", from which engines may not fetch; " + use + ", or have the operator add the host to media_hosts"
	}
	return ""
}

// cutPrefixFold is strings.CutPrefix of a prefix in any case.
func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// hostName takes the port off a URL's authority, which may have no user.
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

// checkRequestName looks at an id that a client gives its request, or at an array of them.
func checkRequestName(raw []byte) *badField {
	if len(raw) == 0 {
		return nil
	}
	switch raw[0] {
	case '[':
		n := 0
		for it := jsonscan.Walk(raw); it.Next(); n++ {
			if bad := checkRequestName(it.Raw()); bad != nil {
				return bad.within(strconv.Itoa(n))
			}
		}
	case '"':
		if len(raw) <= 6*maxRequestID+2 && validRequestID(jsonscan.Unquote(nil, raw)) {
			return nil
		}
		return &badField{reason: BadField, message: "must be 1 to 128 visible ASCII characters without quotes and backslashes, and name no peer, got " + quotedForError(raw)}
	}
	return nil
}
