package admin

import (
	"context"
	"errors"
	"path/filepath"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/recording"
	"sluice/router/schedule"
)

func TestRecordOverTheAPI(t *testing.T) {
	var rec *recording.Recorder
	f := start(t, func(o *Options) { rec = o.Recorder })
	dir := t.TempDir()
	files, err := recording.NewFiles(recording.FilesOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := f.client.Record(ctx)
	if err != nil {
		t.Fatal(err)
	}
	var wrong *Error
	if _, err := f.client.Record(ctx); !errors.As(err, &wrong) || wrong.Status != 409 {
		t.Errorf("a second recording: %v, want 409", err)
	}
	copied := make(chan error, 1)
	go func() { copied <- recording.Copy(files, stream) }()
	rec.RequestEnded("r1", schedule.Outcome{Status: 200})
	testwait.Until(t, "the entry is sent", func() bool { n, _, b := rec.Counts(); return n == 1 && b > 0 })
	testwait.Until(t, "a file is made", func() bool { made, _ := filepath.Glob(filepath.Join(dir, "*.rec")); return len(made) == 1 })
	time.Sleep(50 * time.Millisecond) // lets sent frames arrive; a shorter pause only shortens the recording
	cancel()
	<-copied
	stream.Close()
	testwait.Until(t, "the router no longer records", func() bool { return !rec.Active() })
	if err := files.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := recording.Open(files.Names()[0])
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var e recording.Entry
	if err := r.Next(&e); err != nil || e.Kind != recording.RecordingInfo {
		t.Errorf("the file begins with %v, %v", e.Kind, err)
	}
}
