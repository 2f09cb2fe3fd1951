package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"encoding/json"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// tokenGuard checks the bearer token of requests. It compares hashes in constant time, so that
// response times reveal neither the token nor its length.
type tokenGuard struct {
	token string
	hash  [32]byte
}

func newTokenGuard(token string) tokenGuard {
	return tokenGuard{token: token, hash: sha256.Sum256([]byte(token))}
}

func (d *tokenGuard) matches(r *http.Request) bool {
	given, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	if !ok {
		return false
	}
	h := sha256.Sum256([]byte(given))
	return subtle.ConstantTimeCompare(h[:], d.hash[:]) == 1
}

// checkRequest rejects requests that an attacker's page could make a browser send: a Host that is
// not this machine (DNS rebinding), or another origin. It also bounds request bodies and sets the
// response headers that isolate the console from other pages.
func (d *tokenGuard) checkRequest(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cache-Control", "no-store")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		if !loopbackHost(r.Host) {
			fail(w, http.StatusForbidden, "bad_host", "the Host header names another machine; want localhost or a loopback address")
			return
		}
		if !sameOrigin(r) {
			fail(w, http.StatusForbidden, "cross_origin", "the request comes from another origin; only the console itself and tools without an Origin header are served")
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, maxBodyBytes)
		next.ServeHTTP(w, r)
	})
}

func loopbackHost(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	return isLoopback(strings.Trim(host, "[]"))
}

func isLoopback(host string) bool {
	if strings.EqualFold(host, "localhost") {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

func sameOrigin(r *http.Request) bool {
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "same-origin", "none":
	default:
		return false
	}
	origin := r.Header.Get("Origin")
	if origin == "" {
		return true
	}
	u, err := url.Parse(origin)
	return err == nil && u.Scheme == "http" && strings.EqualFold(u.Host, r.Host)
}

// requireToken calls next only if the request has the token.
func (d *tokenGuard) requireToken(next http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if !d.matches(r) {
			w.Header().Set("WWW-Authenticate", `Bearer realm="sluice admin"`)
			fail(w, http.StatusUnauthorized, "unauthorized", "want the header Authorization: Bearer TOKEN; `sluice explain` reads the token from the runtime file of the running router")
			return
		}
		next(w, r)
	}
}

func fail(w http.ResponseWriter, status int, code, message string) {
	answer(w, status, map[string]any{"error": map[string]string{"code": code, "message": message}})
}

func answer(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		http.Error(w, `{"error":{"code":"internal","message":"cannot encode the response as JSON"}}`, http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	w.Write(append(body, '\n'))
}

// answerBody answers with JSON that is encoded already, in pieces.
func answerBody(w http.ResponseWriter, pieces ...[]byte) {
	size := 0
	for _, p := range pieces {
		size += len(p)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Content-Length", strconv.Itoa(size))
	for _, p := range pieces {
		if _, err := w.Write(p); err != nil {
			return
		}
	}
}
