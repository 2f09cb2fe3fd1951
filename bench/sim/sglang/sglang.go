// Package sglang has SGLang's hand-over: prefill and decode get the same request
// at the same time and meet in a room, through the bootstrap server of the prefill
// node.
package sglang

import (
	"encoding/json"
	"strconv"
	"strings"
	"sync"

	"sluice/bench/sim/api"
	"sluice/bench/sim/bootstrap"
	"sluice/bench/sim/core"
	"sluice/bench/sim/httpconn"
)

// family is the family in one incarnation.
type family struct {
	p         *core.Process
	bootstrap *bootstrap.Server // of this node, if it is a prefill
	rooms     []rooms           // by rank; each belongs to the rank's goroutine

	mu       sync.Mutex // guards prefills
	prefills map[string]*prefillServer
}

// New returns the family for one incarnation, whose ranks p has and whose bootstrap server is registry.
func New(p *core.Process, registry *bootstrap.Server) core.Family {
	f := &family{p: p, bootstrap: registry, rooms: make([]rooms, p.Options.Ranks), prefills: make(map[string]*prefillServer)}
	for i := range f.rooms {
		f.rooms[i] = rooms{rank: p.Ranks[i], open: make(map[int64]*room), used: make(map[int64]roomReply)}
	}
	p.Rooms = func(r *core.Rank) (requests, handshakes int) {
		rs := f.roomsOf(r)
		requests = rs.waiting()
		return requests, len(rs.open) - requests
	}
	return f
}

// Close implements core.Family.
func (f *family) Close() {
	for i := range f.rooms {
		f.rooms[i].stop()
	}
}

func (f *family) roomsOf(r *core.Rank) *rooms { return &f.rooms[r.Index] }

// leg is one leg of the hand-over.
type leg struct {
	core.WholeLeg
	family      *family
	handovers   map[*core.Seq]*handover // the rooms of the sequences; set by Begin
	prefill     bool
	hosts       []string // by prompt of the batch, or one for all
	ports       []int
	rooms       []int64
	roomList    bool // rooms is a list, which is repeated for n > 1; otherwise the numbers count up
	routed      int  // data-parallel rank of this server, -1 if unspecified
	prefillRank int  // for decode: the rank that has the KV, -1 if unspecified
	follow      bool // the room determines the rank
}

// Read reads the bootstrap members, after the headers that override them. On a
// server that is not part of a P/D pair only the rank has a meaning.
func (f *family) Read(b *api.Body, r *httpconn.Request) (core.Leg, error) {
	o := f.p.Options
	g := &leg{family: f, prefill: o.Role == "prefill", routed: -1, prefillRank: -1, follow: o.Balance != "round_robin"}
	rank := func(p *int, to *int, name string) error {
		if p == nil {
			return nil
		}
		if *p < 0 {
			return api.Refuse(400, name, "%s %d is out of range.", name, *p)
		}
		*to = *p
		return nil
	}
	if err := rank(b.DPRank, &g.routed, "data_parallel_rank"); err != nil {
		return nil, err
	}
	if err := rank(b.RoutedRank, &g.routed, "routed_dp_rank"); err != nil {
		return nil, err
	}
	if err := rank(b.PrefillRank, &g.prefillRank, "disagg_prefill_dp_rank"); err != nil {
		return nil, err
	}
	if o.HeaderOverrides && r.Path != "/v1/completions" {
		if err := g.override(b, r); err != nil {
			return nil, err
		}
	}
	if v, ok := r.Get("X-Data-Parallel-Rank"); ok {
		k, err := strconv.Atoi(strings.TrimSpace(v))
		if err != nil {
			return nil, api.Refuse(400, "", "Invalid X-Data-Parallel-Rank header: %q is not an integer.", v)
		}
		g.routed = k
	}
	if g.routed >= o.Ranks {
		return nil, api.Refuse(400, "", "routed_dp_rank=%d is out of range [0, %d).", g.routed, o.Ranks)
	}
	if o.Role == "aggregated" || o.PD != "sglang" {
		return &rankLeg{routed: g.routed}, nil
	}
	if len(b.Room) == 0 || string(b.Room) == "null" {
		return nil, api.Refuse(400, "", "Disaggregated request received without bootstrap room id")
	}
	var err error
	if g.rooms, g.roomList, err = api.OneOrMany[int64](b.Room, "bootstrap_room", "an integer from 0 to 2^63-1"); err != nil {
		return nil, err
	}
	for _, room := range g.rooms {
		if room < 0 {
			return nil, api.Refuse(400, "bootstrap_room", "bootstrap_room %d is out of range [0, 2^63).", room)
		}
	}
	if g.hosts, _, err = api.OneOrMany[string](b.Host, "bootstrap_host", "a string"); err != nil {
		return nil, err
	}
	if g.ports, _, err = api.OneOrMany[int](b.Port, "bootstrap_port", "an integer"); err != nil {
		return nil, err
	}
	if g.ports == nil {
		g.ports = []int{8998}
	}
	if !g.prefill && g.hosts == nil {
		return nil, api.Refuse(400, "bootstrap_host", "bootstrap_host is required on a decode server.")
	}
	return g, nil
}

// override applies the headers of SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES.
func (g *leg) override(b *api.Body, r *httpconn.Request) error {
	raw := func(name string, to *json.RawMessage, quoted bool) {
		if v, ok := r.Get("x-override-" + name); ok {
			if *to = json.RawMessage(v); quoted {
				*to = api.AppendJSON(nil, v)
			}
		}
	}
	raw("rid", &b.RID, true)
	raw("bootstrap-host", &b.Host, true)
	raw("bootstrap-port", &b.Port, false)
	raw("bootstrap-room", &b.Room, false)
	for name, to := range map[string]*int{"routed-dp-rank": &g.routed, "disagg-prefill-dp-rank": &g.prefillRank} {
		v, ok := r.Get("x-override-" + name)
		if !ok {
			continue
		}
		k, err := strconv.Atoi(v)
		if err != nil || k < 0 {
			return api.Refuse(400, "", "Invalid x-override-%s header: %q is not a rank.", name, v)
		}
		*to = k
	}
	return nil
}

// rankLeg only selects the rank of a request that one engine serves alone.
type rankLeg struct {
	core.WholeLeg
	routed int
}

// Rank implements core.Leg.
func (g *rankLeg) Rank(int) int { return g.routed }

// Side implements core.Leg.
func (g *leg) Side() string {
	if g.prefill {
		return "prefill"
	}
	return "decode"
}

// Rank follows SGLang's rule: the rank of the request, or else on prefill the room
// number modulo the ranks if the balance method follows rooms. A batch runs on the rank
// of its first room here, whereas SGLang spreads it over the ranks of its rooms.
func (g *leg) Rank(ranks int) int {
	if g.routed >= 0 || !g.prefill || !g.follow {
		return g.routed
	}
	return int(g.rooms[0] % int64(ranks))
}

// Begin assigns a room to every sequence.
func (g *leg) Begin(j *core.Job) error {
	batch := len(j.Seqs) / j.Params.N
	for _, c := range []struct {
		name string
		n    int
	}{{"bootstrap_host", len(g.hosts)}, {"bootstrap_port", len(g.ports)}} {
		if c.n > 1 && c.n != batch {
			return api.Refuse(400, c.name, "%s has %d elements for a batch of %d.", c.name, c.n, batch)
		}
	}
	if g.roomList && len(g.rooms) != batch {
		return api.Refuse(400, "bootstrap_room", "bootstrap_room has %d elements for a batch of %d.", len(g.rooms), batch)
	}
	seen := make(map[int64]bool)
	g.handovers = make(map[*core.Seq]*handover, len(j.Seqs))
	for i, s := range j.Seqs {
		item, sample := i/j.Params.N, i%j.Params.N
		m := &handover{}
		if g.roomList {
			m.room = g.rooms[item] // repeated for every sample, as the engine does
		} else {
			m.room = g.rooms[0] + int64(sample*batch+item)
		}
		if m.room < 0 || seen[m.room] {
			return api.Refuse(400, "bootstrap_room", "bootstrap_room %d is used twice in one request.", m.room)
		}
		seen[m.room] = true
		if g.hosts != nil {
			m.host = g.hosts[item%len(g.hosts)]
		}
		m.port = g.ports[item%len(g.ports)]
		g.handovers[s] = m
		if g.prefill {
			s.Limit = 1
		}
	}
	return nil
}
