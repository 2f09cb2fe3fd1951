package admin

import (
	"errors"
	"net/http"
	"time"

	"sluice/router/record"
)

// recordSink passes a recording's frames on to the client, which has writeTimeout
// for each: one that does not keep up is cut, never waited for. The recorder's own
// queue is bounded, so the router does not feel it.
type recordSink struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
}

func (k *recordSink) Frame(_ bool, frame []byte) error {
	if err := k.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := k.w.Write(frame); err != nil {
		return err
	}
	return k.ctl.Flush()
}

func (k *recordSink) Close() error { return nil }

func (s *Server) record(w http.ResponseWriter, r *http.Request) {
	if s.opt.Recorder == nil {
		fail(w, http.StatusNotFound, "no_recorder", "this router has no recorder")
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	sink := &recordSink{w, http.NewResponseController(w)}
	recording, err := s.opt.Recorder.Start(sink)
	if errors.Is(err, record.ErrBusy) {
		w.Header().Del("Content-Type")
		fail(w, http.StatusConflict, "recording_already", "this router is being recorded already, by record.dir in its configuration or by another sluice record")
		return
	}
	s.log.Info("a recording was begun by the admin API")
	select {
	case <-r.Context().Done():
	case <-recording.Done():
	}
	recording.Stop()
	<-recording.Done() // the sink is this call's own
}
