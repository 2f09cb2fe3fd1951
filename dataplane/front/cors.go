package front

import (
	"strconv"
	"strings"
	"time"
)

// CORS lets pages of other origins use the API from a browser (the Fetch standard's
// CORS protocol). Requests without an Origin are not concerned, and no request is
// refused for its origin: a browser keeps the answer from a page that may not see it.
// Credentials (cookies) are never allowed: keys come in Authorization.
type CORS struct {
	Origins []string      // https://app.example, exactly as browsers send them, or * for all
	Methods []string      // [GET, POST]
	Headers []string      // header lines that pages may send; * for all but Authorization [those that clients of the API send]
	MaxAge  time.Duration // browsers ask again after this; 0: each time

	any                      bool
	methods, headers, maxAge string
}

// corsHeaders are what OpenAI's and Anthropic's clients send, and what this router reads.
const corsHeaders = "Authorization, Content-Type, X-Api-Key, X-Request-Id, Anthropic-Version, Anthropic-Beta, Anthropic-Dangerous-Direct-Browser-Access, OpenAI-Organization, OpenAI-Project, OpenAI-Beta, " +
	"X-Stainless-Arch, X-Stainless-Lang, X-Stainless-OS, X-Stainless-Package-Version, X-Stainless-Retry-Count, X-Stainless-Runtime, X-Stainless-Runtime-Version, X-Stainless-Timeout, X-Stainless-Helper-Method, " +
	"X-Sluice-Session"

// corsExposed are the answer's header lines that pages may read beside the few that
// they always may.
const corsExposed = "X-Request-Id, X-Sluice-Reason, X-Sluice-Worker, X-Sluice-Prefill-Worker, X-Sluice-Rank, X-Sluice-Cached-Tokens, X-Sluice-Plan, X-Sluice-Migration, X-Sluice-Waited, Retry-After, " +
	"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens"

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

// allowOrigin gives what the origin is told, "" for nothing.
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

// cors tells a page of another origin what it may see, and answers the question that
// browsers ask before such a request (the preflight): then it gives true. Keys are
// asked for on the real request.
func (x *Exchange) cors(method []byte, known bool) (done bool) {
	c := x.srv.options().CORS
	if c == nil {
		return false
	}
	if !c.any {
		x.SetHeader("Vary", "Origin")
	}
	origin := x.head.find("Origin")
	if len(origin) == 0 {
		return false
	}
	allowed := c.allowOrigin(origin)
	asks := string(method) == "OPTIONS" && known && x.head.find("Access-Control-Request-Method") != nil
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
		x.setIdentityBody(nil)
	}
	return true
}
