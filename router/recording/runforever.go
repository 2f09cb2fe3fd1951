package recording

import (
	"errors"
	"time"
)

// ErrClosed means that the Recorder was closed.
var ErrClosed = errors.New("recording: the recorder is closed")

// RunForever records into the sink that open creates. When the recording ends by itself, for
// example because the disk is full, RunForever tries to begin another one with a new sink at
// the interval every, until Close. While another recording is active it waits for the end of
// that one. The error is that of the first attempt.
func (r *Recorder) RunForever(open func() (Sink, error), every time.Duration) error {
	first, err := r.begin(open)
	if err != nil {
		return err
	}
	go r.runForever(first, open, every)
	return nil
}

func (r *Recorder) begin(open func() (Sink, error)) (*Recording, error) {
	sink, err := open()
	if err != nil {
		return nil, err
	}
	g, err := r.Start(sink)
	if err != nil {
		sink.Close()
	}
	return g, err
}

func (r *Recorder) runForever(g *Recording, open func() (Sink, error), every time.Duration) {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		if g != nil {
			<-g.Done() // Close ends the recording, too
			g = nil
		}
		select {
		case <-r.closed:
			return
		case <-tick.C:
		}
		next, err := r.begin(open)
		switch {
		case err == nil:
			r.opt.Log.Info("recording resumed")
			g = next
		case errors.Is(err, ErrBusy), errors.Is(err, ErrClosed):
		default:
			r.opt.Log.Warn("cannot start recording; retrying", "error", err, "retry_in", every)
		}
	}
}
