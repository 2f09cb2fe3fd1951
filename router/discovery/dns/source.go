package dns

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"sluice/dataplane/backoff"
	"sluice/router/discovery"
	"sluice/router/worker"
)

// Target is the address of one worker in an answer.
type Target struct {
	Addr netip.Addr
	Port uint16
}

// Source finds the workers of one name.
type Source struct {
	// Lookup has the name, the record type and the server to query.
	Lookup Lookup
	// Spec returns the Spec of the worker at a target.
	Spec func(t Target) worker.Spec
	// MinInterval and MaxInterval bound the time between two lookups, whatever the TTL.
	MinInterval, MaxInterval time.Duration
}

// emptyLookups is the number of consecutive empty answers after which Source removes the workers.
// A server that restarts gives empty answers until it has loaded its zone.
const emptyLookups = 3

// Name implements discovery.Source.
func (s *Source) Name() string {
	kind := "A"
	if s.Lookup.SRV {
		kind = "SRV"
	}
	return "dns " + kind + " " + s.Lookup.Host
}

// Run repeats the lookup until ctx ends.
func (s *Source) Run(ctx context.Context, set *discovery.Set) error {
	empty, failed := 0, 0
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-timer.C:
		}
		targets, ttl, err := s.Lookup.Do(ctx)
		if ctx.Err() != nil {
			return nil
		}
		wait := min(max(ttl, s.MinInterval), s.MaxInterval)
		switch {
		case err != nil:
			set.Failed(err)
			wait = backoff.Delay(s.MinInterval, s.MaxInterval, failed)
			failed++
		case len(targets) == 0 && empty+1 < emptyLookups:
			empty++
			failed, wait = 0, s.MinInterval
			set.Failed(fmt.Errorf("dns: %s has no addresses (seen %d times; accepted after %d)", s.Lookup.Host, empty, emptyLookups))
		default:
			failed = 0
			if len(targets) > 0 {
				empty = 0
			}
			specs := make([]worker.Spec, len(targets))
			for i, t := range targets {
				specs[i] = s.Spec(t)
			}
			set.Replace(specs)
		}
		timer.Reset(wait)
	}
}

// fqdn returns a name with a trailing dot.
func fqdn(name string) (dnsmessage.Name, error) {
	return dnsmessage.NewName(strings.TrimSuffix(name, ".") + ".")
}

// sorted sorts targets and removes duplicates, so that the order and number of an answer's records
// have no effect.
func sorted(targets []Target) []Target {
	slices.SortFunc(targets, func(a, b Target) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	return slices.Compact(targets)
}
