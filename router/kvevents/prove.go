package kvevents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	zmq "github.com/pebbe/zmq4"
	"github.com/zeebo/xxh3"
)

// Prove asks an engine's replay for the last message of a position, which no
// other life of the engine can have made, and waits for it no longer than within.
// nil: it is the same life, and its events since are kept. Ask before anything of
// the position is believed, and before Start.
func (f *Feeds) Prove(src Source, pos *Position, within time.Duration) error {
	switch {
	case f.err != nil:
		return f.err
	case src.Replay == "":
		return errors.New("kvevents: the engine has no replay to prove itself by")
	case pos.Next == 0:
		return errors.New("kvevents: the position is of no message")
	}
	dealer, err := f.ctx.NewSocket(zmq.DEALER)
	if err != nil {
		return err
	}
	defer dealer.Close()
	err = errors.Join(dealer.SetLinger(0), dealer.SetRcvtimeo(within), dealer.SetMaxmsgsize(2*int64(f.opt.MaxFrame)),
		setFamily(dealer, src.Replay), dealer.Connect(src.Replay))
	if err != nil {
		return fmt.Errorf("kvevents: cannot ask %q: %w", src.Replay, err)
	}
	if _, err := dealer.SendMessage("", binary.BigEndian.AppendUint64(nil, pos.Next-1)); err != nil {
		return fmt.Errorf("kvevents: cannot ask %q: %w", src.Replay, err)
	}
	frames, err := dealer.RecvMessageBytes(0)
	n := len(frames)
	switch {
	case err != nil:
		return fmt.Errorf("kvevents: %q does not answer within %v", src.Replay, within)
	case n < 3 || n > 4 || len(frames[n-2]) != 8:
		return fmt.Errorf("kvevents: %q answers with a message of %d frames", src.Replay, n)
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
