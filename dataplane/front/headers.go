package front

// headerClass says why a header line is withheld.
type headerClass uint8

const (
	headerForwarded  headerClass = iota
	headerConnection             // about the client's connection, not the request (RFC 9110, 7.6.1)
	headerRouter                 // the router reads it or writes its own
	headerRouting                // decides what only the router may decide: a rank, a peer, another body
	headerForwarding             // names the origin of the request
	headerIdentity               // credentials or an identity that are not meant for the engine
	headerKey                    // an API key; engines see it unless Options.WithholdClientKeys
)

// requestHeaderTable lists the header lines of clients that are withheld from engines; all
// others are forwarded. Names are in lower case. A name that ends with * is a prefix. A name
// also matches with _ in place of -, because servers behind a gateway interface (CGI, WSGI)
// read both as the same name. docs/access.md shows the table.
var requestHeaderTable = map[string]headerClass{
	"connection":          headerConnection,
	"keep-alive":          headerConnection,
	"proxy-authenticate":  headerConnection,
	"proxy-authorization": headerConnection,
	"proxy-connection":    headerConnection,
	"te":                  headerConnection,
	"trailer":             headerConnection,
	"transfer-encoding":   headerConnection,
	"upgrade":             headerConnection,
	"http2-settings":      headerConnection,

	"accept-encoding":               headerRouter, // the router reads the answer
	"content-encoding":              headerRouter,
	"content-length":                headerRouter,
	"expect":                        headerRouter,
	"host":                          headerRouter,
	"x-request-id":                  headerRouter,
	"x-sluice-*":                    headerRouter,
	"x-llm-d-inference-fairness-id": headerRouter, // the tenant
	"x-llm-d-inference-objective":   headerRouter, // the class
	"x-llm-d-slo-ttft-ms":           headerRouter,
	"x-llm-d-slo-tpot-ms":           headerRouter,
	"x-slo-ttft-ms":                 headerRouter,
	"x-slo-tpot-ms":                 headerRouter,
	"if-match":                      headerRouter, // an answer is whole, and never a 304
	"if-modified-since":             headerRouter, // an answer is whole, and never a 304
	"if-none-match":                 headerRouter, // an answer is whole, and never a 304
	"if-range":                      headerRouter, // an answer is whole, and never a 304
	"if-unmodified-since":           headerRouter, // an answer is whole, and never a 304
	"range":                         headerRouter, // an answer is whole, and never a 304

	"x-data-parallel-rank":      headerRouting,
	"x-data-parallel-host-port": headerRouting,
	"x-prefiller-host-port":     headerRouting,
	"x-override-*":              headerRouting, // SGLang: fields of the body (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES)
	"x-encoder-hosts-ports":     headerRouting,
	"x-http-method-override":    headerRouting,
	"x-prefill-host-port":       headerRouting,
	"x-prefiller-url":           headerRouting,
	"x-rewrite-url":             headerRouting,
	"x-smg-*":                   headerRouting,

	"cf-connecting-ip":         headerForwarding,
	"client-ip":                headerForwarding,
	"fastly-client-ip":         headerForwarding,
	"forwarded":                headerForwarding,
	"origin":                   headerForwarding,
	"referer":                  headerForwarding,
	"true-client-ip":           headerForwarding,
	"via":                      headerForwarding,
	"x-client-ip":              headerForwarding,
	"x-cluster-client-ip":      headerForwarding,
	"x-forwarded-*":            headerForwarding,
	"x-original-*":             headerForwarding,
	"x-real-ip":                headerForwarding,
	"x-appengine-user-ip":      headerForwarding,
	"x-azure-clientip":         headerForwarding,
	"x-azure-socketip":         headerForwarding,
	"x-envoy-external-address": headerForwarding,
	"x-forwarded":              headerForwarding,
	"x-host":                   headerForwarding,
	"x-originating-ip":         headerForwarding,
	"x-proxyuser-ip":           headerForwarding,
	"x-remote-addr":            headerForwarding,
	"x-remote-ip":              headerForwarding,

	"cf-access-*":              headerIdentity,
	"client-cert":              headerIdentity, // RFC 9440
	"client-cert-chain":        headerIdentity,
	"cookie":                   headerIdentity,
	"openai-organization":      headerIdentity,
	"openai-project":           headerIdentity,
	"remote-user":              headerIdentity,
	"ssl-client-*":             headerIdentity,
	"x-access-token":           headerIdentity,
	"x-amz-security-token":     headerIdentity,
	"x-amzn-oidc-*":            headerIdentity,
	"x-auth-request-*":         headerIdentity,
	"x-auth-token":             headerIdentity,
	"x-authenticated-*":        headerIdentity,
	"x-client-cert":            headerIdentity,
	"x-csrf-token":             headerIdentity,
	"x-goog-authenticated-*":   headerIdentity,
	"x-goog-iap-jwt-assertion": headerIdentity,
	"x-goog-user-project":      headerIdentity,
	"x-ms-client-principal*":   headerIdentity,
	"x-ms-token-*":             headerIdentity,
	"x-remote-user":            headerIdentity,
	"x-ssl-*":                  headerIdentity,
	"x-vault-token":            headerIdentity,
	"x-xsrf-token":             headerIdentity,
	"authentication":           headerIdentity,
	"authorization-token":      headerIdentity,
	"cf-aig-authorization":     headerIdentity,
	"cookie2":                  headerIdentity,
	"helicone-auth":            headerIdentity,
	"private-token":            headerIdentity,
	"x-auth-key":               headerIdentity,
	"x-authentication":         headerIdentity,
	"x-authorization":          headerIdentity,
	"x-client-dn":              headerIdentity,
	"x-functions-key":          headerIdentity,
	"x-github-token":           headerIdentity,
	"x-session-token":          headerIdentity,
	"x-user":                   headerIdentity,
	"x-webauth-user":           headerIdentity,

	"api-key":                   headerKey, // Azure OpenAI
	"authorization":             headerKey,
	"ocp-apim-subscription-key": headerKey, // Azure API Management
	"x-api-key":                 headerKey, // Anthropic
	"x-goog-api-key":            headerKey,
	"openai-api-key":            headerKey,
	"anthropic-api-key":         headerKey,
	"x-openai-api-key":          headerKey,
	"x-anthropic-api-key":       headerKey,
}

// responseHeaderTable lists the header lines of engines that are withheld from clients; all
// others, such as Content-*, Retry-After and x-ratelimit-*, are forwarded. Names match as in
// requestHeaderTable. docs/access.md shows the table.
var responseHeaderTable = map[string]headerClass{
	"access-control-*": headerRouter,
	"date":             headerRouter,
	"x-request-id":     headerRouter,
	"x-sluice-*":       headerRouter,

	// A peer's address and the handle of its KV cache: engines' P2P connectors answer with them.
	"kv-transfer-params":   headerRouting,
	"x-kv-transfer-params": headerRouting,

	"alt-svc":                   headerRouting,
	"content-security-policy*":  headerRouting,
	"clear-site-data":           headerRouting,
	"content-location":          headerRouting,
	"expect-ct":                 headerRouting,
	"link":                      headerRouting, // a browser fetches what it names
	"location":                  headerRouting,
	"nel":                       headerRouting,
	"public-key-pins*":          headerRouting,
	"refresh":                   headerRouting,
	"report-to":                 headerRouting,
	"reporting-endpoints":       headerRouting,
	"service-worker-allowed":    headerRouting,
	"sourcemap":                 headerRouting,
	"strict-transport-security": headerRouting,
	"x-accel-redirect":          headerRouting, // nginx in front serves another file
	"x-lighttpd-send-file":      headerRouting,
	"x-reproxy-url":             headerRouting,
	"x-sendfile":                headerRouting,

	"authentication-info": headerIdentity,
	"authorization":       headerIdentity,
	"set-cookie":          headerIdentity,
	"set-cookie2":         headerIdentity,

	"www-authenticate": headerKey, // belongs to a 401 only
}

var requestHeaders, responseHeaders = newHeaderNames(requestHeaderTable), newHeaderNames(responseHeaderTable)

// headerNames maps the names of header lines to classes.
type headerNames struct {
	classes map[string]headerClass
	// prefixes are the names that end with *, without it, by their first byte.
	prefixes [256][]headerPrefix
	// starts has, for each length, a bit for the first byte (modulo 32) of each name of
	// that length, so that most header lines need no map look-up.
	starts [maxHeaderName + 1]uint32
}

func newHeaderNames(classes map[string]headerClass) *headerNames {
	h := &headerNames{classes: classes}
	for name, class := range classes {
		h.starts[len(name)] |= 1 << (name[0] & 31)
		if n := len(name) - 1; name[n] == '*' {
			h.prefixes[name[0]] = append(h.prefixes[name[0]], headerPrefix{name[:n], class})
		}
	}
	return h
}

type headerPrefix struct {
	name  string
	class headerClass
}

// maxHeaderName is an upper bound of the length of the names in the tables.
const maxHeaderName = 32

// classOf returns the class of a client's header line.
func classOf(name []byte) headerClass { return requestHeaders.classOf(name) }

func (h *headerNames) classOf(name []byte) headerClass {
	if len(name) == 0 {
		return headerForwarded
	}
	exact := len(name) <= maxHeaderName && h.starts[len(name)]&(1<<(name[0]&31)) != 0
	prefixes := h.prefixes[name[0]|0x20]
	if !exact && prefixes == nil {
		return headerForwarded
	}
	var lower [maxHeaderName]byte
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
	return headerForwarded
}

// reachesEngine reports whether header lines of this class are forwarded to engines.
func (c headerClass) reachesEngine(ownKeys bool) bool {
	return c == headerForwarded || c == headerKey && !ownKeys
}

// reachesClient reports whether an engine's header line of this name is forwarded to the
// client in a response with this status.
func reachesClient(name []byte, status int) bool {
	class := responseHeaders.classOf(name)
	return class == headerForwarded || class == headerKey && status == 401
}
