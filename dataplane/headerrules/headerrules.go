// Package headerrules decides which header lines pass the router: those of clients to engines and
// those of engines to clients. A line passes unless a table names it.
package headerrules

// Class says why a header line is withheld.
type Class uint8

// The classes.
const (
	Forwarded  Class = iota
	Connection       // about the client's connection, not the request (RFC 9110, 7.6.1)
	Router           // the router reads it or writes its own
	Routing          // decides what only the router may decide: a rank, a peer, another body
	Forwarding       // names the origin of the request
	Identity         // credentials or an identity that are not meant for the engine
	Key              // an API key; engines see it unless the router has keys of its own
)

// RequestTable lists the header lines of clients that are withheld from engines; all
// others are forwarded. Names are in lower case. A name that ends with * is a prefix. A name
// also matches with _ in place of -, because servers behind a gateway interface (CGI, WSGI)
// read both as the same name. docs/access.md shows the table.
var RequestTable = map[string]Class{
	"connection":          Connection,
	"keep-alive":          Connection,
	"proxy-authenticate":  Connection,
	"proxy-authorization": Connection,
	"proxy-connection":    Connection,
	"te":                  Connection,
	"trailer":             Connection,
	"transfer-encoding":   Connection,
	"upgrade":             Connection,
	"http2-settings":      Connection,

	"accept-encoding":               Router, // the router reads the answer
	"content-encoding":              Router,
	"content-length":                Router,
	"expect":                        Router,
	"host":                          Router,
	"x-request-id":                  Router,
	"x-sluice-*":                    Router,
	"x-llm-d-inference-fairness-id": Router, // the tenant
	"x-llm-d-inference-objective":   Router, // the class
	"x-llm-d-slo-ttft-ms":           Router,
	"x-llm-d-slo-tpot-ms":           Router,
	"x-slo-ttft-ms":                 Router,
	"x-slo-tpot-ms":                 Router,
	"if-match":                      Router, // an answer is whole, and never a 304
	"if-modified-since":             Router, // an answer is whole, and never a 304
	"if-none-match":                 Router, // an answer is whole, and never a 304
	"if-range":                      Router, // an answer is whole, and never a 304
	"if-unmodified-since":           Router, // an answer is whole, and never a 304
	"range":                         Router, // an answer is whole, and never a 304

	"x-data-parallel-rank":      Routing,
	"x-data-parallel-host-port": Routing,
	"x-prefiller-host-port":     Routing,
	"x-override-*":              Routing, // SGLang: fields of the body (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES)
	"x-encoder-hosts-ports":     Routing,
	"x-http-method-override":    Routing,
	"x-prefill-host-port":       Routing,
	"x-prefiller-url":           Routing,
	"x-rewrite-url":             Routing,
	"x-smg-*":                   Routing,

	"cf-connecting-ip":         Forwarding,
	"client-ip":                Forwarding,
	"fastly-client-ip":         Forwarding,
	"forwarded":                Forwarding,
	"origin":                   Forwarding,
	"referer":                  Forwarding,
	"true-client-ip":           Forwarding,
	"via":                      Forwarding,
	"x-client-ip":              Forwarding,
	"x-cluster-client-ip":      Forwarding,
	"x-forwarded-*":            Forwarding,
	"x-original-*":             Forwarding,
	"x-real-ip":                Forwarding,
	"x-appengine-user-ip":      Forwarding,
	"x-azure-clientip":         Forwarding,
	"x-azure-socketip":         Forwarding,
	"x-envoy-external-address": Forwarding,
	"x-forwarded":              Forwarding,
	"x-host":                   Forwarding,
	"x-originating-ip":         Forwarding,
	"x-proxyuser-ip":           Forwarding,
	"x-remote-addr":            Forwarding,
	"x-remote-ip":              Forwarding,

	"cf-access-*":              Identity,
	"client-cert":              Identity, // RFC 9440
	"client-cert-chain":        Identity,
	"cookie":                   Identity,
	"openai-organization":      Identity,
	"openai-project":           Identity,
	"remote-user":              Identity,
	"ssl-client-*":             Identity,
	"x-access-token":           Identity,
	"x-amz-security-token":     Identity,
	"x-amzn-oidc-*":            Identity,
	"x-auth-request-*":         Identity,
	"x-auth-token":             Identity,
	"x-authenticated-*":        Identity,
	"x-client-cert":            Identity,
	"x-csrf-token":             Identity,
	"x-goog-authenticated-*":   Identity,
	"x-goog-iap-jwt-assertion": Identity,
	"x-goog-user-project":      Identity,
	"x-ms-client-principal*":   Identity,
	"x-ms-token-*":             Identity,
	"x-remote-user":            Identity,
	"x-ssl-*":                  Identity,
	"x-vault-token":            Identity,
	"x-xsrf-token":             Identity,
	"authentication":           Identity,
	"authorization-token":      Identity,
	"cf-aig-authorization":     Identity,
	"cookie2":                  Identity,
	"helicone-auth":            Identity,
	"private-token":            Identity,
	"x-auth-key":               Identity,
	"x-authentication":         Identity,
	"x-authorization":          Identity,
	"x-client-dn":              Identity,
	"x-functions-key":          Identity,
	"x-github-token":           Identity,
	"x-session-token":          Identity,
	"x-user":                   Identity,
	"x-webauth-user":           Identity,

	"api-key":                   Key, // Azure OpenAI
	"authorization":             Key,
	"ocp-apim-subscription-key": Key, // Azure API Management
	"x-api-key":                 Key, // Anthropic
	"x-goog-api-key":            Key,
	"openai-api-key":            Key,
	"anthropic-api-key":         Key,
	"x-openai-api-key":          Key,
	"x-anthropic-api-key":       Key,
}

// ResponseTable lists the header lines of engines that are withheld from clients; all
// others, such as Content-*, Retry-After and x-ratelimit-*, are forwarded. Names match as in
// RequestTable. docs/access.md shows the table.
var ResponseTable = map[string]Class{
	"access-control-*": Router,
	"date":             Router,
	"x-request-id":     Router,
	"x-sluice-*":       Router,

	// A peer's address and the handle of its KV cache: engines' P2P connectors answer with them.
	"kv-transfer-params":   Routing,
	"x-kv-transfer-params": Routing,

	"alt-svc":                   Routing,
	"content-security-policy*":  Routing,
	"clear-site-data":           Routing,
	"content-location":          Routing,
	"expect-ct":                 Routing,
	"link":                      Routing, // a browser fetches what it names
	"location":                  Routing,
	"nel":                       Routing,
	"public-key-pins*":          Routing,
	"refresh":                   Routing,
	"report-to":                 Routing,
	"reporting-endpoints":       Routing,
	"service-worker-allowed":    Routing,
	"sourcemap":                 Routing,
	"strict-transport-security": Routing,
	"x-accel-redirect":          Routing, // nginx in front serves another file
	"x-lighttpd-send-file":      Routing,
	"x-reproxy-url":             Routing,
	"x-sendfile":                Routing,

	"authentication-info": Identity,
	"authorization":       Identity,
	"set-cookie":          Identity,
	"set-cookie2":         Identity,

	"www-authenticate": Key, // belongs to a 401 only
}

var request, response = newNames(RequestTable), newNames(ResponseTable)

// names maps the names of header lines to classes.
type names struct {
	classes map[string]Class
	// prefixes are the names that end with *, without it, by their first byte.
	prefixes [256][]prefix
	// starts has, for each length, a bit for the first byte (modulo 32) of each name of
	// that length, so that most header lines need no map look-up.
	starts [maxName + 1]uint32
}

func newNames(classes map[string]Class) *names {
	h := &names{classes: classes}
	for name, class := range classes {
		h.starts[len(name)] |= 1 << (name[0] & 31)
		if n := len(name) - 1; name[n] == '*' {
			h.prefixes[name[0]] = append(h.prefixes[name[0]], prefix{name[:n], class})
		}
	}
	return h
}

type prefix struct {
	name  string
	class Class
}

// maxName is an upper bound of the length of the names in the tables.
const maxName = 32

// OfRequest returns the class of a client's header line.
func OfRequest(name []byte) Class { return request.classOf(name) }

func (h *names) classOf(name []byte) Class {
	if len(name) == 0 {
		return Forwarded
	}
	exact := len(name) <= maxName && h.starts[len(name)]&(1<<(name[0]&31)) != 0
	prefixes := h.prefixes[name[0]|0x20]
	if !exact && prefixes == nil {
		return Forwarded
	}
	var lower [maxName]byte
	n := copy(lower[:], name)
	for i := range n {
		switch c := lower[i]; {
		case 'A' <= c && c <= 'Z':
			lower[i] = c | 0x20
		case c == '_':
			lower[i] = '-'
		}
	}
	if exact {
		if class, ok := h.classes[string(lower[:n])]; ok {
			return class
		}
	}
	for _, p := range prefixes {
		if n >= len(p.name) && string(lower[:len(p.name)]) == p.name {
			return p.class
		}
	}
	return Forwarded
}

// ReachesEngine reports whether a client's header lines of this class are forwarded to engines.
// withholdKeys says that API keys are the router's own.
func (c Class) ReachesEngine(withholdKeys bool) bool {
	return c == Forwarded || c == Key && !withholdKeys
}

// NeverForwarded reports whether lines of this class never reach engines, not even those that the
// router itself sets.
func (c Class) NeverForwarded() bool {
	return c == Connection || c == Router || c == Routing
}

// ReachesClient reports whether an engine's header line of this name is forwarded to the
// client in a response with this status.
func ReachesClient(name []byte, status int) bool {
	class := response.classOf(name)
	return class == Forwarded || class == Key && status == 401
}
