package bootstrap

import (
	"encoding/json"
	"net/url"
	"strconv"
	"sync"

	"sluice/bench/sim/httpconn"
)

const maxRoomRanks = 1 << 16 // rooms whose rank is known

// Server is the server of a prefill node through which decode engines find the ranks
// of the prefill: SGLang's (5.x: /route, /query_dp_ranks) or that of vLLM's Mooncake
// connector (/query).
type Server struct {
	mu      sync.Mutex
	ranks   map[rankKey]Rank
	size    int // number of ranks that must be registered before /route returns them
	rooms   map[int64]int
	order   []int64
	workers map[string]*WorkerRank

	enginePort int
	follow     bool
}

// rankKey identifies a rank in decode's queries: data-parallel, context, tensor,
// pipeline.
type rankKey struct{ dp, cp, tp, pp int }

// Rank is the body of PUT /route.
type Rank struct {
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

// New returns a server of the prefill engine on an HTTP port. Follow says that
// the number of a room determines its rank.
func New(enginePort int, follow bool) *Server {
	return &Server{enginePort: enginePort, follow: follow, ranks: make(map[rankKey]Rank), rooms: make(map[int64]int), workers: make(map[string]*WorkerRank)}
}

// Register adds a rank, as PUT /route does.
func (b *Server) Register(e Rank) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranks[rankKey{e.DPRank, e.CPRank, e.TPRank, e.PPRank}] = e
	b.size = max(e.DPSize, 1) * max(e.CPSize, 1) * max(e.TPSize, 1) * max(e.PPSize, 1)
}

// SetRank records the rank of a room, for balance methods that do not follow rooms.
func (b *Server) SetRank(room int64, rank int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if _, ok := b.rooms[room]; !ok {
		if len(b.order) == maxRoomRanks {
			delete(b.rooms, b.order[0])
			b.order = b.order[1:]
		}
		b.order = append(b.order, room)
	}
	b.rooms[room] = rank
}

// Registered reports whether all ranks are registered.
func (b *Server) Registered() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.complete()
}

func (b *Server) complete() bool { return b.size > 0 && len(b.ranks) >= b.size }

// ServeSGLang serves a request to SGLang's bootstrap server.
func (b *Server) ServeSGLang(c *httpconn.Conn, r *httpconn.Request) {
	text := func(status int, s string) { c.Respond(r, status, "text/plain; charset=utf-8", []byte(s)) }
	switch {
	case r.Path == "/health" && r.Method == "GET":
		text(200, "OK")
	case r.Path == "/route" && r.Method == "GET":
		b.route(c, r)
	case r.Path == "/route" && r.Method == "PUT":
		var e Rank
		if err := json.Unmarshal(r.Body, &e); err != nil {
			text(400, err.Error())
			return
		}
		b.Register(e)
		text(200, "OK")
	case r.Path == "/register_dp_rank" && r.Method == "POST":
		var q struct {
			Room *int64 `json:"bootstrap_room"`
			Rank *int   `json:"dp_rank"`
		}
		if json.Unmarshal(r.Body, &q) != nil || q.Room == nil || q.Rank == nil {
			text(400, "want bootstrap_room and dp_rank")
			return
		}
		b.SetRank(*q.Room, *q.Rank)
		text(200, "OK")
	case r.Path == "/query_dp_ranks" && r.Method == "POST":
		var q struct {
			Rooms []int64 `json:"bootstrap_rooms"`
		}
		if json.Unmarshal(r.Body, &q) != nil {
			text(400, "want bootstrap_rooms")
			return
		}
		ranks := map[string]int{}
		b.mu.Lock()
		for _, room := range q.Rooms {
			if k, ok := b.rooms[room]; ok {
				ranks[strconv.FormatInt(room, 10)] = k
			}
		}
		b.mu.Unlock()
		respondJSON(c, r, ranks)
	case r.Path == "/route" || r.Path == "/health" || r.Path == "/register_dp_rank" || r.Path == "/query_dp_ranks":
		text(405, "405: Method Not Allowed")
	default:
		text(404, "404: Not Found")
	}
}

// route serves GET /route: all values -1 ask for the server, other values for one rank.
func (b *Server) route(c *httpconn.Conn, r *httpconn.Request) {
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
	complete := b.complete()
	first := b.ranks[rankKey{}]
	e, known := b.ranks[rankKey{at[0], at[1], at[2], at[3]}]
	b.mu.Unlock()
	switch {
	case at == [4]int{-1, -1, -1, -1} && !complete:
		text(503, "Prefill server not fully registered yet.")
	case at == [4]int{-1, -1, -1, -1}:
		respondJSON(c, r, struct {
			TP     int    `json:"attn_tp_size"`
			CP     int    `json:"attn_cp_size"`
			DP     int    `json:"dp_size"`
			PP     int    `json:"pp_size"`
			Page   int    `json:"page_size"`
			DType  string `json:"kv_cache_dtype"`
			Follow bool   `json:"follow_bootstrap_room"`
			Port   int    `json:"prefill_http_port"`
			Policy string `json:"decode_allocation_policy"`
		}{first.TPSize, first.CPSize, first.DPSize, first.PPSize, first.Page, first.DType, b.follow, b.enginePort, "auto"})
	case !known:
		text(404, "Bootstrap info not Found")
	default:
		respondJSON(c, r, struct {
			IP   string `json:"rank_ip"`
			Port int    `json:"rank_port"`
		}{e.IP, e.Port})
	}
}

func respondJSON(c *httpconn.Conn, r *httpconn.Request, v any) {
	body, _ := json.Marshal(v) // of types that always can be encoded
	c.Respond(r, 200, "application/json", body)
}
