package admission

import (
	"maps"
	"slices"
	"time"
)

// accounts are what a Queue remembers beside its requests, so that a reload neither cancels what tenants and
// classes have been given nor gives it to them again.
type accounts map[string]*poolAccounts

type poolAccounts struct {
	lateSeq    uint64
	classes    map[string]*classAccounts // by name
	emptySince map[string]time.Time      // by group
}

type classAccounts struct {
	clock, mean, credit float64
	turns               uint64
	tenants             map[string]*tenant
	overflow            *tenant
	idle                []*tenant // the one that has been idle longest is first
}

// moveTo moves all requests to an empty Queue, in the order of arrival, and what is remembered beside them.
// classOf returns the class that a request has there. displaced is called for each that finds no space.
func (q *Queue) moveTo(to *Queue, classOf func(*Item) int, displaced func(*Item, Bound)) {
	remembered := q.accounts()
	for _, it := range q.Drain() {
		it.Class = classOf(it)
		others, bound := to.Push(it, nil)
		for _, d := range others {
			displaced(d, d.exceeded)
		}
		if bound != WithinBounds {
			displaced(it, bound)
		}
	}
	to.restoreAccounts(remembered)
}

// accounts returns what is remembered now. It holds after Drain too.
func (q *Queue) accounts() accounts {
	all := accounts{}
	for name, l := range q.pools {
		p := &poolAccounts{lateSeq: l.lateSeq, classes: map[string]*classAccounts{}, emptySince: map[string]time.Time{}}
		for i := range l.classes {
			k := &l.classes[i]
			a := &classAccounts{clock: k.clock, mean: k.mean, credit: k.credit, turns: k.turns, tenants: maps.Clone(k.tenants), overflow: k.overflow}
			for t := k.idle.first; t != nil; t = t.next {
				a.idle = append(a.idle, t)
			}
			p.classes[q.classes[i].Name] = a
		}
		for _, g := range l.groups {
			p.emptySince[g.name] = g.emptySince
		}
		all[name] = p
	}
	return all
}

// restoreAccounts continues with what another Queue remembered, for the pools and classes that have requests.
// Late requests must have been pushed with the numbers that they had there.
func (q *Queue) restoreAccounts(all accounts) {
	for name, p := range all {
		l := q.pools[name]
		if l == nil {
			continue
		}
		l.lateSeq = p.lateSeq
		for _, g := range l.groups {
			g.emptySince = p.emptySince[g.name]
		}
		for i := range l.classes {
			switch a := p.classes[q.classes[i].Name]; {
			case a == nil:
			case l.classes[i].usage.requests > 0:
				l.restoreClass(i, a, q.limits.MaxTenants)
			default:
				l.classes[i].credit = min(a.credit, 0)
			}
		}
	}
}

func (l *poolQueue) restoreClass(class int, a *classAccounts, maxTenants int) {
	k := &l.classes[class]
	k.clock, k.mean, k.credit, k.turns = a.clock, a.mean, a.credit, k.turns+a.turns
	for t := range k.all {
		old := a.tenants[t.name]
		if t == k.overflow {
			old = a.overflow
		}
		if old == nil { // of a class that was removed, or one whose turn others shared
			t.given = k.floor()
			t.turn += a.turns
			continue
		}
		t.given, t.turn, t.rate = max(old.given, k.floor()), old.turn, old.rate
	}
	for _, old := range a.idle {
		if k.tenants[old.name] == nil && a.tenants[old.name] == old && old.given > k.floor() && !k.isFull(maxTenants) {
			t := &tenant{name: old.name, weight: old.weight, given: old.given, turn: old.turn, isSettled: true}
			k.tenants[t.name] = t
			k.idle.add(t)
		}
	}
	for _, g := range l.groups {
		lanes := slices.Clone(g.ready[class])
		g.ready[class] = g.ready[class][:0]
		for _, n := range lanes {
			g.ready[class].push(n)
		}
	}
}
