package vllm

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"sluice/bench/sim/eventcodec"
)

// Release is a vLLM version 0.minor.patch. Each of its methods names one difference
// between releases on the wire; all minor releases were compared.
type Release struct{ minor, patch int }

// ParseRelease reads a version such as "0.22" or "0.11.1", from 0.9 to 0.33.
func ParseRelease(s string) (Release, error) {
	var r Release
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

// String returns the release as 0.MINOR.PATCH, as /version does.
func (r Release) String() string { return fmt.Sprintf("0.%d.%d", r.minor, r.patch) }

// Since reports whether the release is 0.minor.patch or later.
func (r Release) Since(minor, patch int) bool {
	return r.minor > minor || r.minor == minor && r.patch >= patch
}

// Lease returns how long prefill keeps blocks that no decode has fetched: without
// limit in 0.9, then VLLM_NIXL_ABORT_REQUEST_TIMEOUT, since 0.22 a lease that
// heartbeats renew.
func (r Release) Lease() time.Duration {
	switch {
	case r.Since(22, 0):
		return 30 * time.Second
	case r.Since(11, 1):
		return 480 * time.Second
	case r.Since(10, 0):
		return 120 * time.Second
	}
	return 100 * 365 * 24 * time.Hour
}

// Heartbeats reports whether decode renews the lease of blocks that it waits for.
func (r Release) Heartbeats() bool { return r.Since(22, 0) }

// ChecksBudget reports whether a thinking budget is checked against max_tokens,
// except in a prefill leg.
func (r Release) ChecksBudget() bool { return r.Since(32, 0) }

// FlatIDs reports whether remote_block_ids is a list instead of a list of lists.
func (r Release) FlatIDs() bool { return !r.Since(18, 0) }

// RemoteID reports whether the handle names the request. Before, both legs carry one
// X-Request-Id.
func (r Release) RemoteID() bool { return r.Since(13, 0) }

// IDSuffix reports whether the engine appends a random suffix to a request's id.
func (r Release) IDSuffix() bool { return r.Since(14, 0) }

// StopRetainsBlocks reports whether a prefill that ends with "stop" keeps its blocks too.
func (r Release) StopRetainsBlocks() bool { return r.Since(21, 0) }

// RefusalReleases reports whether a decode engine that rejects a request releases the
// blocks of the prefill engine.
func (r Release) RefusalReleases() bool { return r.Since(21, 0) }

// CancelReleases reports whether the API server releases the blocks at prefill when the
// client of a decode that is not streamed disconnects, whatever its core does.
func (r Release) CancelReleases() bool { return r.Since(21, 0) }

// StreamsHandle reports whether a streamed prefill response carries the handle.
func (r Release) StreamsHandle() bool { return r.Since(33, 0) }

// FlatErrors reports whether an error response is the error object itself.
func (r Release) FlatErrors() bool { return !r.Since(10, 1) }

// RankHeader reports whether X-data-parallel-rank selects the rank.
func (r Release) RankHeader() bool { return r.Since(11, 1) }

// ReturnsIDs reports whether return_token_ids is supported.
func (r Release) ReturnsIDs() bool { return r.Since(10, 2) }

// AcceptsPromptIDs reports whether a request may carry its prompt's token ids in kv_transfer_params.
func (r Release) AcceptsPromptIDs() bool { return r.Since(32, 0) }

// HasEndpoint reports whether the release has the endpoint path.
func (r Release) HasEndpoint(path string) bool {
	switch path {
	case "/kv_event_sources":
		return r.Since(31, 0)
	case "/inference/v1/generate", "/v1/messages", "/v1/messages/count_tokens", "/abort_requests":
		return r.Since(11, 1)
	case "/inference/v1/abort_requests":
		return r.Since(32, 0)
	case "/v1/responses":
		return r.Since(10, 0)
	}
	return true
}

// Encoding returns the name of the release's KV event encoding, as of package eventcodec.
func (r Release) Encoding() string {
	name := ""
	for _, n := range eventcodec.Encodings() {
		v, ok := strings.CutPrefix(n, "vllm-")
		if first, err := ParseRelease(v); ok && err == nil && r.Since(first.minor, first.patch) {
			name = n
		}
	}
	return name
}

// OldMetrics replaces the names of metrics with those before 0.12.
var OldMetrics = strings.NewReplacer("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:prefix_cache_", "vllm:gpu_prefix_cache_")
