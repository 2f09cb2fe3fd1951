package front

import (
	"strconv"
	"strings"
	"time"
)

// CORS lets pages of other origins use the API from a browser (the Fetch standard's CORS
// protocol). It does not affect requests without an Origin header. Only preflights of unknown
// origins are refused: the browser itself hides other responses from pages that may not read
// them. Credentials (cookies) are never allowed; clients send their keys in Authorization.
type CORS struct {
	Origins []string      // origins as browsers send them, such as https://app.example; * for all
	Methods []string      // methods that pages may use [GET, POST]
	Headers []string      // header lines that pages may send; * for all but Authorization [corsHeaders]
	MaxAge  time.Duration // how long browsers may cache a preflight's answer; 0: not at all

	any                      bool
	methods, headers, maxAge string
}

// corsHeaders are the header lines that OpenAI's and Anthropic's clients send and that this
// router reads.
const corsHeaders = "Authorization, Content-Type, X-Api-Key, X-Request-Id, Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access, OpenAI-Organization, OpenAI-Project, OpenAI-Beta, " +
	"X-Stainless-Arch, X-Stainless-Lang, X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, X-Stainless-Helper-Method, " +
	"X-Sluice-Session, X-Sluice-Session-Final"

// corsExposed are the response's header lines that pages may read, in addition to the few that
// the Fetch standard always allows.
const corsExposed = "X-Request-Id, X-Sluice-Reason, X-Sluice-Worker, X-Sluice-Prefill-Worker, X-Sluice-Rank, X-Sluice-Cached-Tokens, X-Sluice-Plan, X-Sluice-Migration, X-Sluice-Queue-Time, X-Sluice-Waited, Retry-After, " +
	"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"

// withJoined returns c with its lists joined to header values, and defaults for empty lists.
func (c CORS) withJoined() CORS {
	for _, o := range c.Origins {
		c.any = c.any || o == "*"
	}
	c.methods = strings.Join(c.Methods, ", ")
	if c.methods == "" {
		c.methods = "GET, POST"
	}
	c.headers = strings.Join(c.Headers, ", ")
	if c.headers == "" {
		c.headers = corsHeaders
	}
	c.maxAge = strconv.FormatInt(int64(c.MaxAge/time.Second), 10)
	return c
}

// allowOrigin returns the value of Access-Control-Allow-Origin for origin, "" if the origin is
// not allowed.
func (c *CORS) allowOrigin(origin []byte) string {
	if c.any {
		return "*"
	}
	for _, o := range c.Origins {
		if string(origin) == o {
			return o
		}
	}
	return ""
}

// cors adds the CORS header lines for a page of another origin. If the request is a preflight,
// cors answers it and returns true; a preflight needs no API key, the request behind it does.
// known says that the path has a route.
func (x *httpExchange) cors(method []byte, known bool) (done bool) {
	c := x.srv.options().CORS
	if c == nil {
		return false
	}
	if !c.any {
		x.SetHeader("Vary", "Origin")
	}
	origin := x.head.Find("Origin")
	if len(origin) == 0 {
		return false
	}
	allowed := c.allowOrigin(origin)
	asks := string(method) == "OPTIONS" && known && x.head.Find("Access-Control-Request-Method") != nil
	switch {
	case allowed == "" && asks:
		x.Error(OriginRefused, "", "pages of origin "+quotedForError(origin)+" may not use this router; cors.origins lists those that may", 0)
		return true
	case allowed == "":
		return false
	}
	x.SetHeader("Access-Control-Allow-Origin", allowed)
	if !asks {
		x.SetHeader("Access-Control-Expose-Headers", corsExposed)
		return false
	}
	x.SetHeader("Access-Control-Allow-Methods", c.methods)
	x.SetHeader("Access-Control-Allow-Headers", c.headers)
	x.SetHeader("Access-Control-Max-Age", c.maxAge)
	if x.beginResponse(204) {
		x.path.setBody(nil)
	}
	return true
}
