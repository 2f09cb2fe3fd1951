package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"syscall"
	"time"

	"sluice/router/recording"
)

// recordSink writes the frames of a recording to the client. Each write has a deadline of
// writeTimeout: the recording of a client that is too slow ends. The recorder's own queue is
// bounded, so a slow client does not delay the router.
type recordSink struct {
	ctx context.Context // context of the request
	w   http.ResponseWriter
	ctl *http.ResponseController
}

// Frame implements recording.Sink. It returns recording.ErrReaderClosed if the client has disconnected.
func (k *recordSink) Frame(_ bool, frame []byte) error {
	if err := k.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	_, err := k.w.Write(frame)
	if err == nil {
		err = k.ctl.Flush()
	}
	if err != nil && (k.ctx.Err() != nil || errors.Is(err, syscall.EPIPE) || errors.Is(err, syscall.ECONNRESET)) {
		return fmt.Errorf("%w: %w", recording.ErrReaderClosed, err)
	}
	return err
}

// Close implements recording.Sink; the response ends with its handler.
func (k *recordSink) Close() error { return nil }

func (s *Server) record(w http.ResponseWriter, r *http.Request) {
	if s.opt.Recorder == nil {
		fail(w, http.StatusNotFound, "no_recorder", "this router has no recorder")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	sink := &recordSink{r.Context(), w, http.NewResponseController(w)}
	active, err := s.opt.Recorder.Start(sink)
	if errors.Is(err, recording.ErrBusy) {
		w.Header().Del("Content-Type")
		fail(w, http.StatusConflict, "recording_already", "a recording is already active, by recording.dir in the configuration or by another sluice record")
		return
	}
	s.log.Info("recording started by the admin API")
	select {
	case <-r.Context().Done():
	case <-active.Done():
	}
	active.Stop()
	<-active.Done() // the recorder may use w until then
}
