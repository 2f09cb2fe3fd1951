package sim

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// release is a vLLM version 0.minor.patch. What differs between releases on the
// wire is asked here, by name; "compared" releases are those of every minor.
type release struct{ minor, patch int }

// parseRelease reads "0.22" or "0.11.1", from 0.9 on.
func parseRelease(s string) (release, error) {
	var r release
	parts := strings.Split(s, ".")
	err := fmt.Errorf("sim: cannot use release %q: want a vLLM release from 0.9 to 0.33, like 0.11.1", s)
	if len(parts) < 2 || len(parts) > 3 || parts[0] != "0" {
		return r, err
	}
	var bad error
	if r.minor, bad = strconv.Atoi(parts[1]); bad != nil {
		return r, err
	}
	if len(parts) == 3 {
		if r.patch, bad = strconv.Atoi(parts[2]); bad != nil {
			return r, err
		}
	}
	if r.minor < 9 || r.minor > 33 || r.patch < 0 {
		return r, err
	}
	return r, nil
}

func (r release) String() string { return fmt.Sprintf("0.%d.%d", r.minor, r.patch) }

// since says whether the release is minor.patch or later.
func (r release) since(minor, patch int) bool {
	return r.minor > minor || r.minor == minor && r.patch >= patch
}

// lease is how long prefill keeps blocks nobody fetched: for ever in 0.9, then
// VLLM_NIXL_ABORT_REQUEST_TIMEOUT, since 0.22 a lease that heartbeats renew.
func (r release) lease() time.Duration {
	switch {
	case r.since(22, 0):
		return 30 * time.Second
	case r.since(11, 1):
		return 480 * time.Second
	case r.since(10, 0):
		return 120 * time.Second
	}
	return 100 * 365 * 24 * time.Hour
}

func (r release) heartbeats() bool        { return r.since(22, 0) }
func (r release) checksBudget() bool      { return r.since(32, 0) }  // of thinking, against max_tokens, but in a prefill leg
func (r release) flatIDs() bool           { return !r.since(18, 0) } // remote_block_ids is a list, not one of lists
func (r release) remoteID() bool          { return r.since(13, 0) }  // the handle names the request; before, both legs carry one X-Request-Id
func (r release) idSuffix() bool          { return r.since(14, 0) }
func (r release) stopRetainsBlocks() bool { return r.since(21, 0) } // a prefill that ends with "stop" keeps its blocks too
func (r release) refusalReleases() bool   { return r.since(21, 0) }

// cancelReleases: the API server tells prefill of a decode that was not streamed and whose client
// left, as it does of one that it refuses, whatever its core has told or will.
func (r release) cancelReleases() bool   { return r.since(21, 0) }
func (r release) streamsHandle() bool    { return r.since(33, 0) }
func (r release) flatErrors() bool       { return !r.since(10, 1) }
func (r release) rankHeader() bool       { return r.since(11, 1) }
func (r release) returnsIDs() bool       { return r.since(10, 2) }
func (r release) acceptsPromptIDs() bool { return r.since(32, 0) }

// hasEndpoint says whether the release has an endpoint.
func (r release) hasEndpoint(path string) bool {
	switch path {
	case "/kv_event_sources":
		return r.since(31, 0)
	case "/inference/v1/generate", "/v1/messages", "/v1/messages/count_tokens", "/abort_requests":
		return r.since(11, 1)
	case "/inference/v1/abort_requests":
		return r.since(32, 0)
	case "/v1/responses":
		return r.since(10, 0)
	}
	return true
}

// encoding is the KV event form of the release, by name.
func (r release) encoding() string {
	name := ""
	for _, e := range encodings {
		v, ok := strings.CutPrefix(e.name, "vllm-")
		if first, err := parseRelease(v); ok && err == nil && r.since(first.minor, first.patch) {
			name = e.name
		}
	}
	return name
}

// oldMetrics are the names before 0.12.
var oldMetrics = strings.NewReplacer("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
