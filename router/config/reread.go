package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"sluice/router/worker"
)

// Path is the file that the configuration was read from; "" for none.
func (c *Config) Path() string { return c.path }

// Reread makes the configuration of a new text of its file, with the same
// environment and flags over it. Of the result Apply takes over what a running router
// can.
func (c *Config) Reread(text []byte) (*Config, error) {
	if c.reparse == nil {
		return nil, fmt.Errorf("config: cannot read the configuration again: it was not read from a file")
	}
	return c.reparse(text)
}

// ParseWorkers reads a file that holds workers alone, as discovery.file names
// one. name stands for it in errors; they are Errors, each with its place. A
// worker without an id has none here: it is named after its role and address,
// which stay the same when the list around it changes.
func ParseWorkers(name string, text []byte) ([]worker.Spec, error) {
	var f errorList
	c := Default()
	d := decoder{file: name, errs: &f, origins: c.origins}
	var file struct {
		Workers []Worker `yaml:"workers"`
	}
	if root := d.parse(text); root != nil {
		d.value(root, reflect.ValueOf(&file).Elem(), "", "")
	}
	if _, given := c.origins["workers"]; !given && len(f.list) == 0 {
		// An editor that is not done, or a disk that was full: not a fleet of none.
		f.add(origin{file: name, line: 1, col: 1}, "workers", `there is no such field; want "workers: []" to say that there is none`)
	}
	c.Workers = file.Workers
	c.fillDefaults()
	c.check(&f)
	if err := f.err(); err != nil {
		return nil, err
	}
	specs := make([]worker.Spec, len(c.Workers))
	for i := range c.Workers {
		specs[i] = c.Workers[i].Spec("file")
	}
	return specs, nil
}

// CheckWorker checks one worker as an entry of workers is checked; for sources
// that combine values. The error names fields as the file does.
func CheckWorker(w Worker) error {
	c := Default()
	if w.BlockSize < 0 || w.BlockSize > 1<<20 {
		return fmt.Errorf("block_size: %d; want from 0 to %d", w.BlockSize, 1<<20)
	}
	for _, bound := range []struct {
		field string
		value int64
	}{{"max_requests", w.MaxRequests}, {"rank_requests", w.RankRequests}, {"rank_tokens", w.RankTokens}} {
		if bound.value < 0 {
			return fmt.Errorf("%s: %d; want 0 (no limit) or more", bound.field, bound.value)
		}
	}
	c.Workers = []Worker{w}
	err := c.Validate()
	var all Errors
	if !errors.As(err, &all) {
		return err
	}
	text := make([]string, len(all))
	for i, e := range all {
		text[i] = strings.TrimPrefix(strings.TrimPrefix(e.Field, "workers[0]"), ".") + ": " + e.Msg
	}
	return errors.New(strings.Join(text, "; "))
}
