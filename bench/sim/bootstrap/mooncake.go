package bootstrap

import (
	"encoding/json"
	"fmt"
	"strconv"

	"sluice/bench/sim/httpconn"
)

// Worker is the body of POST /register.
type Worker struct {
	EngineID string `json:"engine_id"`
	DPRank   int    `json:"dp_rank"`
	TPRank   int    `json:"tp_rank"`
	PPRank   int    `json:"pp_rank"`
	Addr     string `json:"addr"`
}

// WorkerRank is one data-parallel rank in GET /query.
type WorkerRank struct {
	EngineID string                       `json:"engine_id"`
	Addr     map[string]map[string]string `json:"worker_addr"`
}

// RegisterWorker adds the address of one worker process. It returns an error if the data-parallel rank
// belongs to another engine or if the process is registered already; the server answers 400 with it.
func (b *Server) RegisterWorker(w Worker) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	key := strconv.Itoa(w.DPRank)
	e := b.workers[key]
	if e == nil {
		e = &WorkerRank{EngineID: w.EngineID, Addr: make(map[string]map[string]string)}
		b.workers[key] = e
	}
	if e.EngineID != w.EngineID {
		return fmt.Errorf("dp_rank %d is registered with engine_id %q", w.DPRank, e.EngineID)
	}
	tp, pp := strconv.Itoa(w.TPRank), strconv.Itoa(w.PPRank)
	if e.Addr[tp] == nil {
		e.Addr[tp] = make(map[string]string)
	}
	if old, ok := e.Addr[tp][pp]; ok {
		return fmt.Errorf("worker dp_rank %d, tp_rank %d, pp_rank %d is registered at %q", w.DPRank, w.TPRank, w.PPRank, old)
	}
	e.Addr[tp][pp] = w.Addr
	return nil
}

// ServeMooncake serves vLLM's Mooncake bootstrap server: /query, /register.
func (b *Server) ServeMooncake(c *httpconn.Conn, r *httpconn.Request) {
	switch {
	case r.Path == "/query" && r.Method == "GET":
		b.mu.Lock()
		body, _ := json.Marshal(b.workers)
		b.mu.Unlock()
		c.Respond(r, 200, "application/json", body)
	case r.Path == "/register" && r.Method == "POST":
		var w Worker
		err := json.Unmarshal(r.Body, &w)
		if err == nil && (w.EngineID == "" || w.Addr == "") {
			err = fmt.Errorf("engine_id and addr are required")
		}
		if err == nil {
			err = b.RegisterWorker(w)
		}
		if err != nil {
			body, _ := json.Marshal(map[string]string{"detail": err.Error()})
			c.Respond(r, 400, "application/json", body)
			return
		}
		respondJSON(c, r, map[string]string{"status": "ok"})
	case r.Path == "/query" || r.Path == "/register":
		c.Respond(r, 405, "application/json", []byte(`{"detail":"Method Not Allowed"}`))
	default:
		c.Respond(r, 404, "application/json", []byte(`{"detail":"Not Found"}`))
	}
}
