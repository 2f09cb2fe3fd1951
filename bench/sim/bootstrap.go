package sim

import (
	"encoding/json"
	"net"
	"net/url"
	"strconv"
	"sync"

	"sluice/bench/sim/httpconn"
	"sluice/bench/sim/portreserve"
)

// bootstrap is the server of a prefill node through which decode engines find the ranks
// of the prefill: SGLang's (5.x: /route, /query_dp_ranks) or that of vLLM's Mooncake
// connector (/query), by Options.PD.
type bootstrap struct {
	mu      sync.Mutex
	ranks   map[rankKey]rankEntry
	size    int // number of ranks that must be registered before /route returns them
	rooms   map[int64]int
	order   []int64
	workers map[string]*mooncakeEntry
}

// rankKey identifies a rank in decode's queries: data-parallel, context, tensor,
// pipeline.
type rankKey struct{ dp, cp, tp, pp int }

// rankEntry is the body of PUT /route.
type rankEntry struct {
	TPSize int    `json:"attn_tp_size"`
	TPRank int    `json:"attn_tp_rank"`
	CPSize int    `json:"attn_cp_size"`
	CPRank int    `json:"attn_cp_rank"`
	DPSize int    `json:"system_dp_size"`
	DPRank int    `json:"system_dp_rank"`
	PPSize int    `json:"pp_size"`
	PPRank int    `json:"pp_rank"`
	IP     string `json:"rank_ip"`
	Port   int    `json:"rank_port"`
	Page   int    `json:"page_size"`
	DType  string `json:"kv_cache_dtype"`
}

func (b *bootstrap) init() {
	b.ranks, b.rooms = make(map[rankKey]rankEntry), make(map[int64]int)
	b.workers = make(map[string]*mooncakeEntry)
}

// register adds a rank, as PUT /route does.
func (b *bootstrap) register(e rankEntry) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks[rankKey{e.DPRank, e.CPRank, e.TPRank, e.PPRank}] = e
	b.size = max(e.DPSize, 1) * max(e.CPSize, 1) * max(e.TPSize, 1) * max(e.PPSize, 1)
}

// setRank records the rank of a room, for balance methods that do not follow rooms.
func (b *bootstrap) setRank(room int64, rank int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.rooms[room]; !ok {
		if len(b.order) == maxRooms {
			delete(b.rooms, b.order[0])
			b.order = b.order[1:]
		}
		b.order = append(b.order, room)
	}
	b.rooms[room] = rank
}

// registerRanks registers the ranks of this incarnation after Options.RegisterDelay.
func (l *incarnation) registerRanks() {
	if !sleepContext(l.ctx, l.e.o.RegisterDelay) {
		return
	}
	host, port, _ := net.SplitHostPort(l.side.Addr().String())
	n, _ := strconv.Atoi(port)
	for i := range l.ranks {
		l.bootstrap.register(rankEntry{TPSize: 1, CPSize: 1, DPSize: len(l.ranks), DPRank: i, PPSize: 1, IP: host, Port: n, Page: l.e.o.BlockSize, DType: "auto"})
		l.bootstrap.registerWorker(mooncakeWorker{EngineID: l.rankID(i), DPRank: i, Addr: l.side.Addr().String()})
	}
}

// serveBootstrap serves one request of the bootstrap port.
func serveBootstrap(c *conn, r *httpconn.Request) *job {
	l := c.incarnation
	l.e.log.add(r, -1)
	if f := l.e.matchFault(r, "bootstrap", false); f != nil && c.faultBeforeHead(r, f, nil) {
		return nil
	}
	if l.e.o.PD == "mooncake" {
		serveMooncakeBootstrap(c, r)
		return nil
	}
	text := func(status int, s string) { c.Respond(r, status, "text/plain; charset=utf-8", []byte(s)) }
	b := &l.bootstrap
	switch {
	case r.Path == "/health" && r.Method == "GET":
		text(200, "OK")
	case r.Path == "/route" && r.Method == "GET":
		b.route(c, r)
	case r.Path == "/route" && r.Method == "PUT":
		var e rankEntry
		if err := json.Unmarshal(r.Body, &e); err != nil {
			text(400, err.Error())
			return nil
		}
		b.register(e)
		text(200, "OK")
	case r.Path == "/register_dp_rank" && r.Method == "POST":
		var q struct {
			Room *int64 `json:"bootstrap_room"`
			Rank *int   `json:"dp_rank"`
		}
		if json.Unmarshal(r.Body, &q) != nil || q.Room == nil || q.Rank == nil {
			text(400, "want bootstrap_room and dp_rank")
			return nil
		}
		b.setRank(*q.Room, *q.Rank)
		text(200, "OK")
	case r.Path == "/query_dp_ranks" && r.Method == "POST":
		var q struct {
			Rooms []int64 `json:"bootstrap_rooms"`
		}
		if json.Unmarshal(r.Body, &q) != nil {
			text(400, "want bootstrap_rooms")
			return nil
		}
		ranks := map[string]int{}
		b.mu.Lock()
		for _, room := range q.Rooms {
			if k, ok := b.rooms[room]; ok {
				ranks[strconv.FormatInt(room, 10)] = k
			}
		}
		b.mu.Unlock()
		c.json(r, ranks)
	case r.Path == "/route" || r.Path == "/health" || r.Path == "/register_dp_rank" || r.Path == "/query_dp_ranks":
		text(405, "405: Method Not Allowed")
	default:
		text(404, "404: Not Found")
	}
	return nil
}

// route serves GET /route: all values -1 ask for the server, other values for one rank.
func (b *bootstrap) route(c *conn, r *httpconn.Request) {
	text := func(status int, s string) { c.Respond(r, status, "text/plain; charset=utf-8", []byte(s)) }
	q, err := url.ParseQuery(r.Query)
	var at [4]int
	for i, name := range [4]string{"prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"} {
		if err == nil {
			at[i], err = strconv.Atoi(q.Get(name))
		}
	}
	if err != nil {
		text(400, "Missing inputs for bootstrap server.")
		return
	}
	b.mu.Lock()
	complete := b.size > 0 && len(b.ranks) >= b.size
	first := b.ranks[rankKey{}]
	e, known := b.ranks[rankKey{at[0], at[1], at[2], at[3]}]
	b.mu.Unlock()
	o := &c.incarnation.e.o
	switch {
	case at == [4]int{-1, -1, -1, -1} && !complete:
		text(503, "Prefill server not fully registered yet.")
	case at == [4]int{-1, -1, -1, -1}:
		_, port, _ := net.SplitHostPort(c.incarnation.e.addrs[0])
		n, _ := strconv.Atoi(port)
		c.json(r, struct {
			TP     int    `json:"attn_tp_size"`
			CP     int    `json:"attn_cp_size"`
			DP     int    `json:"dp_size"`
			PP     int    `json:"pp_size"`
			Page   int    `json:"page_size"`
			DType  string `json:"kv_cache_dtype"`
			Follow bool   `json:"follow_bootstrap_room"`
			Port   int    `json:"prefill_http_port"`
			Policy string `json:"decode_allocation_policy"`
		}{first.TPSize, first.CPSize, first.DPSize, first.PPSize, first.Page, first.DType, o.Balance != "round_robin", n, "auto"})
	case !known:
		text(404, "Bootstrap info not Found")
	default:
		c.json(r, struct {
			IP   string `json:"rank_ip"`
			Port int    `json:"rank_port"`
		}{e.IP, e.Port})
	}
}

// startBootstrap opens the bootstrap port of a prefill engine whose family has one.
func (l *incarnation) startBootstrap() error {
	e := l.e
	l.bootstrap.init()
	if e.o.Role != "prefill" || e.o.PD != "sglang" && e.o.PD != "mooncake" {
		return nil
	}
	if e.bootstrapAddr == "" {
		h, err := portreserve.Reserve(e.o.Bootstrap)
		if err != nil {
			return err
		}
		e.placeholders = append(e.placeholders, h)
		e.bootstrapAddr = h.Addr.String()
	}
	ln, err := portreserve.Listen(e.bootstrapAddr)
	if err != nil {
		return err
	}
	l.bootstrapListener = ln
	l.listeners = append(l.listeners, ln)
	l.wg.Add(1)
	go l.accept(ln, -1, serveBootstrap)
	if e.o.RegisterDelay <= 0 {
		l.registerRanks()
	} else {
		l.wg.Go(l.registerRanks)
	}
	return nil
}

// Bootstrap returns the host and port of the bootstrap server, or "" and 0 if there is
// none.
func (e *Engine) Bootstrap() (host string, port int) {
	host, p, err := net.SplitHostPort(e.bootstrapAddr)
	if err != nil {
		return "", 0
	}
	port, _ = strconv.Atoi(p)
	return host, port
}
