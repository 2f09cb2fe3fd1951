package registration

import (
	"net"
	"net/http"
	"net/netip"
)

// connector tells an engine's connector where to report transfers. The response contains the keys
// to the router's completion board. It goes only to callers that the limiter and the guard admit;
// proxies must not cache it, and it is never logged.
func (s *Server) connector(w http.ResponseWriter, r *http.Request) {
	if s.opt.Connector == nil {
		fail(w, &refusal{404, "no_connector", "this router receives no reports of transfers", 0})
		return
	}
	var reached netip.Addr
	if a, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr); ok {
		reached = a.AddrPort().Addr().Unmap().WithZone("")
	}
	doc, err := s.opt.Connector(reached)
	if err != nil {
		fail(w, &refusal{404, "no_connector", err.Error(), 0})
		return
	}
	w.Header().Set("Cache-Control", "no-store")
	answer(w, http.StatusOK, doc)
}
