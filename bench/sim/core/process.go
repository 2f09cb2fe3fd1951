package core

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/bench/sim/cost"
	"sluice/bench/sim/faults"
	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/options"
)

// Process is the process of an engine in one incarnation, as its ranks and the legs of its requests see
// it. Its fields do not change after the ranks have started.
type Process struct {
	Options *options.Options
	ID      string // engine id
	Ranks   []*Rank
	Context context.Context // ends first when the incarnation ends
	Go      func(func())    // runs a function in a goroutine for which the end of the incarnation waits
	Crash   func()          // ends the process as a crash
	Side    net.Addr        // address of the side channel, on which other simulated engines call this one
	Client  *http.Client    // for the side channels of others
	Blocks  *BlockLog
	// Match returns the fault that occurs to a request that does not generate, see faults.Set.Match; nil if none.
	Match func(r *httpconn.Request, leg string) *faults.Fault
	// Rooms returns the open rooms of a rank that have a request of its own, and the others; nil: the
	// family has no rooms. It runs on the rank's goroutine.
	Rooms func(r *Rank) (requests, handshakes int)

	IgnoredPD atomic.Int64 // requests whose P/D members the engine ignored with a warning
}

// RankID returns the engine id of one rank, as vLLM names it.
func (p *Process) RankID(rank int) string {
	if len(p.Ranks) < 2 {
		return p.ID
	}
	return fmt.Sprintf("%s_dp%d", p.ID, rank)
}

// RankByID returns the rank with an engine id, or nil if the id is not of this
// incarnation.
func (p *Process) RankByID(id string) *Rank {
	for i, x := range p.Ranks {
		if p.RankID(i) == id {
			return x
		}
	}
	return nil
}

// SideHostPort returns the host and the port of the side channel.
func (p *Process) SideHostPort() (host string, port int) {
	host, text, _ := net.SplitHostPort(p.Side.String())
	port, _ = strconv.Atoi(text)
	return host, port
}

// HandoverFault returns the fault of the hand-over of a job, nil if none.
func (p *Process) HandoverFault(j *Job) *faults.Fault { return p.Match(j.Request, "handover") }

// TransferTime returns how long the KV of tokens tokens needs, scaled by Options.Speed.
func (p *Process) TransferTime(tokens int) time.Duration {
	return cost.Scale(p.Options.Cost.TransferTime(tokens), p.Options.Speed)
}

// Handshake returns how long the first contact with another engine needs, scaled by Options.Speed.
func (p *Process) Handshake() time.Duration {
	return cost.Scale(p.Options.Cost.Handshake, p.Options.Speed)
}

// Call makes one call to another engine's bootstrap server or side channel.
func (p *Process) Call(ctx context.Context, method, addr, path string, body, reply any) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var rd io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		rd = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+addr+path, rd)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := p.Client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return err
	}
	if resp.StatusCode != 200 {
		return fmt.Errorf("%s %s: %s: %.100s", method, path, resp.Status, b)
	}
	if reply == nil {
		return nil
	}
	return json.Unmarshal(b, reply)
}

// Sleep sleeps d; it returns false if ctx ends meanwhile.
func Sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// FaultTransfer applies a fault of the hand-over: Stall and Slow wait (a stall without
// Delay until ctx ends); all other kinds make the transfer fail, which returns false.
func FaultTransfer(ctx context.Context, f *faults.Fault) bool {
	switch {
	case f == nil:
		return true
	case f.Kind == faults.Stall && f.Delay <= 0:
		<-ctx.Done()
		return false
	case f.Kind == faults.Stall || f.Kind == faults.Slow:
		return Sleep(ctx, f.Delay)
	}
	return false
}

// PromptSum returns the hash by which the two sides of a hand-over compare their prompts.
func PromptSum(ids []uint32) uint64 {
	b := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		b = binary.LittleEndian.AppendUint32(b, id)
	}
	return xxh3.Hash(b)
}
