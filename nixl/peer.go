package nixl

import (
	"context"
	"fmt"
	"sync/atomic"
)

// Peer is a remote agent whose metadata was loaded.
type Peer struct {
	name     string
	versions string // as passed to LoadPeer; may be empty
	handle   uint64
	down     atomic.Bool
}

// Name returns the peer's own name.
func (p *Peer) Name() string { return p.name }

// Down reports that a send or a transfer to the peer failed. Nothing more is sent to
// the peer until its metadata is loaded again.
func (p *Peer) Down() bool { return p.down.Load() }

// maxMetadata limits a blob: a worker with thousands of regions has a few MiB.
const maxMetadata = 64 << 20

// LoadPeer makes the agent with this metadata reachable. Loading a known peer renews
// it; a peer that was down is tried again.
//
// versions names the peer's NIXL, such as "NIXL 1.3.2"; pass it whenever it is known. A
// peer with an incompatible version is rejected with ErrVersion: NIXL would accept its
// metadata, and the first message would crash the peer's process. Errors contain
// versions too, because NIXL returns "backend error" for every mismatch.
func (a *Agent) LoadPeer(ctx context.Context, metadata []byte, versions string) (*Peer, error) {
	operation := "load a peer's metadata"
	if versions != "" {
		operation += " (of " + versions + ")"
	}
	if len(metadata) == 0 || len(metadata) > maxMetadata {
		return nil, &Error{Operation: operation, Status: InvalidParam, Hint: fmt.Sprintf("%d bytes; want 1 to %d", len(metadata), maxMetadata)}
	}
	// Without peer failure handling (shared memory) the versions proved compatible.
	if l := a.library; l != nil && a.cfg.Parameters["ucx_error_handling_mode"] != "none" {
		if why := mismatch(l.NIXL, versions); why != "" {
			return nil, &Error{Operation: operation, Status: VersionMismatch, Hint: why + " (UCX here: " + l.UCX + ")"}
		}
	}
	ans, err := a.call(ctx, &command{op: opLoad, data: metadata}, operation)
	if err != nil {
		return nil, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.peers[ans.handle]
	if p == nil {
		p = &Peer{name: string(ans.data), versions: versions, handle: ans.handle}
		a.peers[ans.handle] = p
	}
	p.down.Store(false)
	return p, nil
}

// DropPeer removes a peer: its metadata, endpoints and keys.
func (a *Agent) DropPeer(ctx context.Context, p *Peer) error {
	a.mu.Lock()
	delete(a.peers, p.handle)
	a.mu.Unlock()
	p.down.Store(true)
	_, err := a.call(ctx, &command{op: opInvalidate, handle: p.handle}, fmt.Sprintf("drop peer %q", p.name))
	return err
}

// CheckPeer asks NIXL whether it has the peer's metadata.
func (a *Agent) CheckPeer(ctx context.Context, p *Peer) error {
	_, err := a.call(ctx, &command{op: opCheck, handle: p.handle}, fmt.Sprintf("check peer %q", p.name))
	return err
}

// ConnectPeer connects now; otherwise the first send connects.
func (a *Agent) ConnectPeer(ctx context.Context, p *Peer) error {
	_, err := a.call(ctx, &command{op: opConnect, handle: p.handle}, fmt.Sprintf("connect to peer %q", p.name))
	return err
}
