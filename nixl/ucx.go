package nixl

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"sluice/native/ucx"
)

// UCXVariable is the environment variable that names libucp: a file, or its directory.
const UCXVariable = "SLUICE_UCX_LIBRARY"

// UCXConfig describes an agent over UCX's active messages, without NIXL.
type UCXConfig struct {
	// Agent is as for NIXL. The Python environments and the configured NIXL of its Search
	// are searched for the UCX that they contain. Parameters are settings of UCX without
	// its prefix ("TLS", "NET_DEVICES"). Backend, ProgressDelay, Poll and Telemetry are
	// ignored.
	Agent Config
	// Path is that of libucp, a file or a directory; if set, nothing else is tried.
	Path string
}

// OpenUCX starts an agent over UCX alone: peers, Post, Notify and OnNotification work
// as with NIXL, memory and transfers do not. Its Metadata is an address that gives no
// access to memory; its holder can send messages. Both ends must run UCX up to 1.21, or
// both a later one; otherwise LoadPeer returns ErrVersion.
func OpenUCX(ctx context.Context, cfg UCXConfig) (*Agent, error) {
	if err := cfg.Agent.defaults(); err != nil {
		return nil, err
	}
	limit := cfg.Agent.StartTimeout
	if d, ok := ctx.Deadline(); ok {
		limit = min(limit, time.Until(d))
	}
	library, err := loadUCX(ctx, cfg.Path, cfg.Agent.Search, limit)
	if err != nil {
		return nil, err
	}
	return openWithLibrary(ctx, cfg.Agent, library, startUCX)
}

// ucxAddressHead is "SLUCX", a version, UCX's major and minor, and the length of the
// name that follows (native/ucx/worker.h: struct address_head).
const ucxAddressHead = 9

// UCXAddress splits the metadata of an agent over UCX into UCP's own address of the
// worker and the version of UCX there, such as "1.23". It serves peers that are not
// agents of this package.
func UCXAddress(metadata []byte) (address []byte, version string, err error) {
	m := metadata
	if len(m) < ucxAddressHead || string(m[:6]) != "SLUCX\x01" || len(m) <= ucxAddressHead+int(m[8]) {
		return nil, "", fmt.Errorf("nixl: invalid UCX agent address (%d bytes)", len(m))
	}
	return m[ucxAddressHead+int(m[8]):], fmt.Sprintf("%d.%d", m[6], m[7]), nil
}

// LoadUCX uses the UCX that is mapped into the process, or finds one and loads it, once
// per process. It waits as Load does.
func LoadUCX(path string, s Search, limit time.Duration) (*Library, error) {
	return loadUCX(context.Background(), path, s, limit)
}

func loadUCX(ctx context.Context, path string, s Search, limit time.Duration) (*Library, error) {
	file, attempts, err := loadFirst(ctx, "UCX", UCXCandidates(path, s), limit, ucx.Load)
	if err != nil {
		return nil, err
	}
	return &Library{Path: file, UCX: ucxVersion(), Attempts: attempts}, nil
}

// UCXCandidates returns the places to try, best first: the configured path alone, or
// else the environment's alone, or else the UCX in the process (""), the one next to
// the configured NIXL, those of the engines' Python environments, the loader's, and
// those of the Python environments found near this process.
func UCXCandidates(path string, s Search) []string {
	if path == "" {
		path = os.Getenv(UCXVariable)
	}
	if path != "" {
		return ucxIn(path)
	}
	c := []string{""}
	if s.Path != "" {
		dir := s.Path
		if i, err := os.Stat(dir); err == nil && !i.IsDir() {
			dir = filepath.Join(filepath.Dir(dir), "..")
		}
		c = append(c, existing(dir, wheelUCX...)...)
		c = append(c, existing(filepath.Join(dir, ".."), wheelUCX[0])...)
	}
	for _, p := range s.Python {
		c = append(c, pythonUCX(p)...)
	}
	c = append(c, "libucp.so.0")
	for _, p := range []string{os.Getenv("VIRTUAL_ENV"), os.Getenv("CONDA_PREFIX"), "/usr/local", "/usr"} {
		if p != "" {
			c = append(c, existing(p, "lib/libucp.so.0")...)
			c = append(c, pythonUCX(p)...)
		}
	}
	return c
}

// wheelUCX lists where the wheels of NIXL and of UCX itself contain libucp.
var wheelUCX = []string{"nixl_cu1[23].libs/libucp-*.so.*", "libucx/lib/libucp.so.0"}

func pythonUCX(prefix string) (found []string) {
	for _, w := range wheelUCX {
		found = append(found, existing(prefix, filepath.Join("lib/python3*/*-packages", w))...)
	}
	return found
}

// ucxIn returns a file as it is; in a directory it looks for libucp.
func ucxIn(path string) []string {
	if i, err := os.Stat(path); err != nil || !i.IsDir() {
		return []string{path}
	}
	c := existing(path, append([]string{"libucp.so.0", "libucp-*.so.*", "lib/libucp.so.0"}, wheelUCX...)...)
	if len(c) == 0 {
		return []string{filepath.Join(path, "libucp.so.0")}
	}
	return c
}

// existing returns the files in dir that match, the newest CUDA first.
func existing(dir string, patterns ...string) (found []string) {
	for _, p := range patterns {
		m, _ := filepath.Glob(filepath.Join(dir, p))
		slices.Sort(m)
		slices.Reverse(m)
		found = append(found, m...)
	}
	return found
}

// UCXTierConfig describes the tier of active messages.
type UCXTierConfig struct {
	UCX UCXConfig
	// After is the NIXL tier, if there is one. Its library may load the UCX that must
	// be used, so this tier waits for its start.
	After TierService
	// DisabledReason, if not nil, keeps the tier off: the configured library cannot be used.
	DisabledReason error
	// The other fields are as in AgentTierConfig.
	Ready                        func(context.Context, *Agent) error
	OnState                      func(TierState, string)
	Isolate                      []string
	CheckInterval, MaxRetryPause time.Duration
}

// StartUCXTier starts to open an agent over UCX alone and returns at once. The tier is
// tested and watched as NIXL's is.
func StartUCXTier(cfg UCXTierConfig) *AgentTier {
	return StartAgentTier(AgentTierConfig{
		Agent: cfg.UCX.Agent, disabledReason: cfg.DisabledReason, Ready: cfg.Ready, OnState: cfg.OnState, CheckInterval: cfg.CheckInterval, MaxRetryPause: cfg.MaxRetryPause, tier: TierUCX, after: cfg.After, Isolate: cfg.Isolate, path: cfg.UCX.Path,
		open: func(ctx context.Context, c Config) (*Agent, error) {
			return OpenUCX(ctx, UCXConfig{Agent: c, Path: cfg.UCX.Path})
		},
	})
}
