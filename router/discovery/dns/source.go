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

// Target is one worker that was found.
type Target struct {
	Addr netip.Addr
	Port uint16
}

// Source looks one name up.
type Source struct {
	// Lookup is the name, its kind and whom to ask.
	Lookup Lookup
	// Spec makes the worker at a target.
	Spec func(t Target) worker.Spec
	// Least and Most bound the time between two lookups, whatever the TTL.
	MinInterval, MaxInterval time.Duration
}

// emptyLookups in a row that a name has no addresses it is believed: a server that
// restarts answers so before it has loaded its zone.
const emptyLookups = 3

// Name implements discovery.Source.
func (s *Source) Name() string {
	kind := "A"
	if s.Lookup.SRV {
		kind = "SRV"
	}
	return "dns " + kind + " " + s.Lookup.Host
}

// Run looks up until ctx ends.
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
			set.Failed(fmt.Errorf("dns: %s has no addresses (seen %d of the %d times that make it believed)", s.Lookup.Host, empty, emptyLookups))
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

// fqdn ends a name with a dot.
func fqdn(name string) (dnsmessage.Name, error) {
	return dnsmessage.NewName(strings.TrimSuffix(name, ".") + ".")
}

// sorted makes the order and number of answers of no account.
func sorted(targets []Target) []Target {
	slices.SortFunc(targets, func(a, b Target) int {
		return cmp.Or(a.Addr.Compare(b.Addr), cmp.Compare(a.Port, b.Port))
	})
	return slices.Compact(targets)
}
