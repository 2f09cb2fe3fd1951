package app

import (
	"fmt"
	"reflect"
	"time"

	"sluice/router/config"
	"sluice/router/kvindex"
	"sluice/router/recording"
	"sluice/router/worker"
)

// newRecorder creates the recorder. An inactive recorder costs almost nothing.
func (r *Router) newRecorder() *recording.Recorder {
	s := r.cfg.Schedule
	rec := recording.New(recording.Options{
		Policy: s.Policy, Weights: ScheduleWeights(&s), Log: r.log,
		Ranks: r.allRanks, Contents: r.exportRank,
	})
	r.metrics.GaugeFunc(func() float64 { n, _, _ := rec.Counts(); return float64(n) }, "sluice_recording_entries_total")
	r.metrics.GaugeFunc(func() float64 { _, n, _ := rec.Counts(); return float64(n) }, "sluice_recording_dropped_total")
	r.metrics.GaugeFunc(func() float64 { _, _, n := rec.Counts(); return float64(n) }, "sluice_recording_bytes_total")
	r.metrics.GaugeFunc(func() float64 {
		if rec.Active() {
			return 1
		}
		return 0
	}, "sluice_recording_active")
	return rec
}

// exportRank calls yield for every chain of cached blocks of a rank: first those of the exact
// index (exact is true), then those of the approximate one. It stops if yield returns false.
func (r *Router) exportRank(rank *worker.Rank, yield func(exact bool, x *kvindex.Exported) bool) {
	more := true
	emit := func(exact bool) func(x *kvindex.Exported) bool {
		return func(x *kvindex.Exported) bool {
			more = yield(exact, x)
			return more
		}
	}
	if index, ok := r.index.(kvindex.Exporter); ok {
		index.Export(rank.Slot, emit(true))
	}
	if more {
		r.approx.Export(rank.Slot, emit(false))
	}
}

// ScheduleWeights returns every number of the scheduler's configuration by its YAML key.
func ScheduleWeights(s *config.Schedule) map[string]float64 {
	all := make(map[string]float64)
	v := reflect.ValueOf(s).Elem()
	for i := range v.NumField() {
		if v.Field(i).Kind() == reflect.Float64 {
			all[v.Type().Field(i).Tag.Get("yaml")] = v.Field(i).Float()
		}
	}
	return all
}

// startRecording starts to record into recording.dir if that is set.
func (r *Router) startRecording() error {
	c := r.cfg.Recording
	if c.Dir == "" {
		return nil
	}
	err := r.recorder.RunForever(func() (recording.Sink, error) {
		return recording.NewFiles(recording.FilesOptions{Dir: c.Dir, MaxFile: c.MaxFile, MaxTotal: c.MaxTotal})
	}, recordAgain)
	if err != nil {
		return fmt.Errorf("recording.dir: %w", err)
	}
	return nil
}

// recordAgain is the delay before the recorder starts another recording after one has ended
// by an error, such as a full disk.
const recordAgain = time.Minute
