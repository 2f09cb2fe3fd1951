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

// VerifyPosition asks an engine's replay for the last message of a position, which no
// other life of the engine can have made, and waits for it no longer than within.
// nil: it is the same life, and its events since are kept. Ask before anything of
// the position is believed, and before Start.
func (f *Feeds) VerifyPosition(src Source, pos *Position, within time.Duration) error {
	switch {
	case f.err != nil:
		return f.err
	case src.ReplayEndpoint == "":
		return errors.New("kvevents: the engine has no replay to prove itself by")
	case pos.Next == 0:
		return errors.New("kvevents: the position is of no message")
	}
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	dealer, err := zmtp.Connect(ctx, src.ReplayEndpoint, zmtp.StreamOptions{Type: "DEALER", MaxMessage: 2 * f.opt.MaxFrame, Handshake: within})
	if err != nil {
		return fmt.Errorf("kvevents: cannot ask %q: %w", src.ReplayEndpoint, err)
	}
	defer dealer.Close()
	if err := dealer.Send(nil, binary.BigEndian.AppendUint64(nil, pos.Next-1)); err != nil {
		return fmt.Errorf("kvevents: cannot ask %q: %w", src.ReplayEndpoint, err)
	}
	frames, err := f.await(ctx, dealer)
	n := len(frames)
	switch {
	case err != nil:
		return fmt.Errorf("kvevents: %q does not answer within %v", src.ReplayEndpoint, within)
	case n < 3 || n > 4 || len(frames[n-2]) != 8:
		return fmt.Errorf("kvevents: %q answers with a message of %d frames", src.ReplayEndpoint, n)
	}
	switch seq := binary.BigEndian.Uint64(frames[n-2]); {
	case seq == replayEnd:
		return fmt.Errorf("kvevents: the engine has published less than %d messages: it was restarted", pos.Next)
	case seq != pos.Next-1:
		return fmt.Errorf("kvevents: the engine keeps no message %d any more, its first is %d", pos.Next-1, seq)
	case xxh3.Hash(frames[n-1]) != pos.LastHash:
		return fmt.Errorf("kvevents: message %d is another one: the engine was restarted", seq)
	}
	return nil
}

// await waits for one message.
func (f *Feeds) await(ctx context.Context, s *zmtp.Stream) (zmtp.Message, error) {
	bell := make(chan struct{}, 1)
	ring := func() {
		select {
		case bell <- struct{}{}:
		default:
		}
	}
	if err := f.poller.Watch(s, ring); err != nil {
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
		case <-bell:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
