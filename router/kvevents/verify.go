package kvevents

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/zeebo/xxh3"

	"sluice/dataplane/zmtp"
)

// VerifyPosition requests the last message of a position from the engine's replay, which no other
// incarnation of the engine can have published, and waits for it at most within. It returns nil if
// the incarnation is the same and its events since are available. Call it before Start and before
// anything from the position is used.
func (f *Feeds) VerifyPosition(src Source, pos *Position, within time.Duration) error {
	switch {
	case f.err != nil:
		return f.err
	case src.ReplayEndpoint == "":
		return errors.New("kvevents: cannot verify the position: the engine has no replay endpoint")
	case pos.Next == 0:
		return errors.New("kvevents: cannot verify the position: it contains no message")
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	dealer, err := zmtp.Connect(ctx, src.ReplayEndpoint, zmtp.StreamOptions{Type: "DEALER", MaxMessage: 2 * f.opt.MaxFrame, Handshake: within})
	if err != nil {
		return fmt.Errorf("kvevents: cannot request a replay from %q: %w", src.ReplayEndpoint, err)
	}
	defer dealer.Close()
	if err := dealer.Send(nil, binary.BigEndian.AppendUint64(nil, pos.Next-1)); err != nil {
		return fmt.Errorf("kvevents: cannot request a replay from %q: %w", src.ReplayEndpoint, err)
	}
	frames, err := f.await(ctx, dealer)
	n := len(frames)
	switch {
	case err != nil:
		return fmt.Errorf("kvevents: no answer from %q within %v", src.ReplayEndpoint, within)
	case n < 3 || n > 4 || len(frames[n-2]) != 8:
		return fmt.Errorf("kvevents: answer from %q has %d frames; want 3 or 4", src.ReplayEndpoint, n)
	}
	switch seq := binary.BigEndian.Uint64(frames[n-2]); {
	case seq == replayEnd:
		return fmt.Errorf("kvevents: the engine has restarted: it has published fewer than %d messages", pos.Next)
	case seq != pos.Next-1:
		return fmt.Errorf("kvevents: the engine no longer keeps message %d; its first is %d", pos.Next-1, seq)
	case xxh3.Hash(frames[n-1]) != pos.LastHash:
		return fmt.Errorf("kvevents: the engine has restarted: message %d differs", seq)
	}
	return nil
}

// await waits for one message.
func (f *Feeds) await(ctx context.Context, s *zmtp.Stream) (zmtp.Message, error) {
	changed := make(chan struct{}, 1)
	notify := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	if err := f.poller.Watch(s, notify); err != nil {
		return nil, err
	}
	for buf := make([]byte, readBytes); ; {
		m, ok, err := s.Next()
		if ok || err != nil {
			return m, err
		}
		if n, _, err := s.Fill(buf); err != nil {
			return nil, err
		} else if n > 0 {
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
