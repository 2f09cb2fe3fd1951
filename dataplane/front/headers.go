package front

// headerClass says why a client's header line does not reach engines.
type headerClass uint8

const (
	headerForwarded  headerClass = iota
	headerConnection             // of the client's connection, not of the request (RFC 9110, 7.6.1)
	headerRouter                 // the router reads it, or writes one of its own
	headerSteering               // it tells an engine what the router decides: a rank, a peer, another body
	headerOrigin                 // it tells where the request comes from
	headerIdentity               // credentials or an identity meant for somebody else than the engine
	headerKey                    // an API key; engines see it unless Options.OwnKeys
)

// headerTable lists the header lines of clients that engines do not see; all others are
// forwarded. Names are in lower case; one that ends with * stands for all that begin so.
// docs/access.md shows the table.
var headerTable = map[string]headerClass{
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

	"accept-encoding":  headerRouter, // the router reads the answer
	"content-encoding": headerRouter,
	"content-length":   headerRouter,
	"expect":           headerRouter,
	"host":             headerRouter,
	"x-request-id":     headerRouter,
	"x-sluice-*":       headerRouter,

	"x-data-parallel-rank":      headerSteering,
	"x-data-parallel-host-port": headerSteering,
	"x-prefiller-host-port":     headerSteering,
	"x-override-*":              headerSteering, // SGLang: fields of the body (SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES)

	"cf-connecting-ip":    headerOrigin,
	"client-ip":           headerOrigin,
	"fastly-client-ip":    headerOrigin,
	"forwarded":           headerOrigin,
	"origin":              headerOrigin,
	"referer":             headerOrigin,
	"true-client-ip":      headerOrigin,
	"via":                 headerOrigin,
	"x-client-ip":         headerOrigin,
	"x-cluster-client-ip": headerOrigin,
	"x-forwarded-*":       headerOrigin,
	"x-original-*":        headerOrigin,
	"x-real-ip":           headerOrigin,

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

	"api-key":                   headerKey, // Azure OpenAI
	"authorization":             headerKey,
	"ocp-apim-subscription-key": headerKey, // Azure API Management
	"x-api-key":                 headerKey, // Anthropic
	"x-goog-api-key":            headerKey,
}

// headerPrefixes are the names of headerTable that end with *, without it, by their first
// byte.
var headerPrefixes = func() (by [256][]headerPrefix) {
	for name, class := range headerTable {
		if n := len(name) - 1; name[n] == '*' {
			by[name[0]] = append(by[name[0]], headerPrefix{name[:n], class})
		}
	}
	return by
}()

// headerStarts has, for each length of a name, a bit for the first byte (modulo 32) of
// each name of headerTable: most header lines need no look into the map.
var headerStarts = func() (by [maxHeaderName + 1]uint32) {
	for name := range headerTable {
		by[len(name)] |= 1 << (name[0] & 31)
	}
	return by
}()

type headerPrefix struct {
	name  string
	class headerClass
}

// maxHeaderName is longer than each name of headerTable.
const maxHeaderName = 32

// classOf finds the class of a header line by its name.
func classOf(name []byte) headerClass {
	if len(name) == 0 {
		return headerForwarded
	}
	exact := len(name) <= maxHeaderName && headerStarts[len(name)]&(1<<(name[0]&31)) != 0
	prefixes := headerPrefixes[name[0]|0x20]
	if !exact && prefixes == nil {
		return headerForwarded
	}
	var lower [maxHeaderName]byte
	n := copy(lower[:], name)
	for i := range n {
		if c := lower[i]; 'A' <= c && c <= 'Z' {
			lower[i] = c | 0x20
		}
	}
	if exact {
		if class, ok := headerTable[string(lower[:n])]; ok {
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

// reachesEngine says whether engines see header lines of this class.
func (c headerClass) reachesEngine(ownKeys bool) bool {
	return c == headerForwarded || c == headerKey && !ownKeys
}
