package config

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"sluice/router/worker"
)

// Path returns the file that the configuration was read from, or "".
func (c *Config) Path() string { return c.path }

// Reread parses text as the new content of the configuration's file, with the same environment and
// flags applied. It fails if c was not read from a file. Apply merges the result into the running
// configuration.
func (c *Config) Reread(text []byte) (*Config, error) {
	if c.reparse == nil {
		return nil, fmt.Errorf("config: cannot read the configuration again: it was not read from a file")
	}
	return c.reparse(text)
}

// ParseWorkers parses a file that contains only workers, such as that of discovery.file. name
// identifies the file in errors, which are of type Errors. A worker without an id keeps none: the
// fleet names it by its role and address, which do not depend on its position in the list.
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
		// An editor that is still writing, or a full disk, leaves an empty file; it must not remove
		// all workers.
		f.add(origin{file: name, line: 1, col: 1}, "workers", `the field is missing; want "workers: []" for a file without workers`)
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

// CheckWorker checks one worker by the rules for an entry of workers. It is for sources that combine
// values from several places. The error names the fields as in a file.
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
