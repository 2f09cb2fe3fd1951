package app

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"sluice/dataplane/front"
	"sluice/router/config"
	"sluice/router/discovery"
	"sluice/router/discovery/registration"
	"sluice/router/fleet"
	"sluice/router/obs"
	"sluice/router/pd"
	"sluice/router/schedule"
	"sluice/router/tokenize"
)

// reloadable is the set of options that a reload changes in a running router. The functions
// that build them also build the options for the start. A reload changes workers and keys as
// well; every other field needs a new process. config.Reloadable says which fields are reloadable.
type reloadable struct {
	Front         front.Options
	Runner        pd.Options
	Scheduler     schedule.Options
	Fleet         fleet.Settings
	Tokenizer     tokenize.Options
	Tokenizers    tokenizerSettings
	PredictionTTL time.Duration // lifetime of predictions in the approximate index
	Registration  registration.Settings
	LogLevel      slog.Level
}

func reloadableOf(cfg *config.Config) (s reloadable, err error) {
	s.Front, s.Runner = frontOptions(cfg).Changeable(), runnerOptions(cfg).Reloadable()
	s.Scheduler, s.Fleet = scheduleOptions(cfg).Reloadable(), fleetOptions(cfg).Settings()
	s.Tokenizer, s.PredictionTTL, s.Registration = tokenOptions(cfg), cfg.Index.ApproxTTL, registration.SettingsOf(&cfg.Registration)
	s.Tokenizers = tokenizerSettingsOf(cfg)
	s.LogLevel, err = obs.Level(cfg.Log.Level)
	return s, err
}

// applyReloadable passes the options to the parts of the router. The validation of the
// configuration has found invalid values before. If a part refuses its options all the same,
// applyReloadable returns the error; the parts that it has already changed stay changed.
func (r *Router) applyReloadable(s reloadable) error {
	if err := r.front.Change(s.Front); err != nil {
		return err
	}
	if err := r.runner.Reload(s.Runner); err != nil {
		return err
	}
	limitBuffers(s.Front.BodyBudgetBytes)
	r.scheduler.Reload(s.Scheduler)
	r.fleet.Reload(s.Fleet)
	r.tokenizer.Reload(s.Tokenizer)
	r.tokenizers.configure(s.Tokenizers)
	r.approx.SetTTL(s.PredictionTTL)
	if r.register != nil {
		r.register.Reload(s.Registration)
	}
	if r.level != nil {
		r.level.Set(s.LogLevel)
	}
	return nil
}

// applyTimeout bounds the wait for the discovery source of the configuration file, which is
// never busy for long.
const applyTimeout = 10 * time.Second

// Reload reads the configuration file again and applies the changes that a running router can
// apply. It returns one change for each field that differs, with its effect. Reload validates
// the whole file first: after an error, which names line and column, nothing has changed. With
// dry, Reload only returns what it would do. Concurrent calls run one after the other.
func (r *Router) Reload(ctx context.Context, dry bool) (changes []config.Change, err error) {
	r.reloads.Lock()
	defer r.reloads.Unlock()
	defer func() {
		if err != nil {
			r.log.Error("the configuration was not reloaded; the current one stays in effect", "file", r.cfg.Path(), "error", err)
		}
	}()
	path := r.cfg.Path()
	if path == "" {
		return nil, errors.New("this router was started without --config: there is no file to read again")
	}
	text, err := discovery.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("cannot read %q: %w", path, err)
	}
	next, err := r.cfg.Reread(text)
	if err != nil {
		return nil, err
	}
	now := r.live.Load()
	changes = now.Changes(next)
	merged, err := now.Apply(next)
	if err != nil {
		return nil, err
	}
	s, err := reloadableOf(merged)
	if err != nil {
		return nil, err
	}
	if dry {
		return changes, nil
	}
	if err := r.applyReloadable(s); err != nil {
		return nil, err
	}
	r.live.Store(merged)
	// The discovery source that watches the file applies workers and keys, from the same text.
	if err := r.updateConfigSource(ctx, text); err != nil {
		return nil, fmt.Errorf("workers and keys: %w", err)
	}
	for _, c := range changes {
		args := []any{"path", c.Path, "old", c.Old, "new", c.New, "effect", string(c.Effect)}
		if c.Reason != "" {
			args = append(args, "reason", c.Reason)
		}
		if c.Warning != "" {
			r.log.Warn("configuration reloaded", append(args, "warning", c.Warning)...)
			continue
		}
		r.log.Info("configuration reloaded", args...)
	}
	if len(changes) == 0 {
		r.log.Info("configuration reloaded: no changes", "file", path)
	}
	return changes, nil
}

// updateConfigSource passes the text of the file to the discovery source that watches it, and
// waits until the source has applied the text, for at most applyTimeout.
func (r *Router) updateConfigSource(ctx context.Context, text []byte) error {
	done := make(chan error, 1)
	limit := time.NewTimer(applyTimeout)
	defer limit.Stop()
	select {
	case r.fileSource <- discovery.Text{Bytes: text, Done: done}:
	case <-limit.C:
		return fmt.Errorf("not applied within %s", applyTimeout)
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-done:
		return err
	case <-limit.C:
		return fmt.Errorf("not applied within %s", applyTimeout)
	}
}

// reloadLists applies the keys of next, and logs the other fields that differ from the
// configuration in effect: they need a reload or a restart.
func (r *Router) reloadLists(next *config.Config) {
	if err := r.reloadKeys(next); err != nil {
		r.log.Error("cannot use the API keys of the configuration", "error", err) // checked before: not reached
		return
	}
	var otherFields []string
	for {
		now := r.live.Load()
		with := now.ApplyLists(next)
		if !r.live.CompareAndSwap(now, with) {
			continue
		}
		for _, c := range with.Changes(next) {
			otherFields = append(otherFields, c.Path)
		}
		break
	}
	if len(otherFields) > 0 {
		r.log.Warn("the configuration has fields that are not in effect: sluice reload applies those that it can, sluice restart all", "file", r.cfg.Path(), "fields", otherFields)
	}
}
