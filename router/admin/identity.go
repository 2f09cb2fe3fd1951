package admin

import (
	"context"
	"net/http"
	"os"
	"time"
)

// Identity says which router an admin listener belongs to. It is the response of /admin/v1/router.
type Identity struct {
	Address string    `json:"address"`          // admin listener, HOST:PORT
	Listen  string    `json:"listen,omitempty"` // clients' listener, HOST:PORT
	Config  string    `json:"config,omitempty"` // absolute path of the configuration file; "": none
	PID     int       `json:"pid"`
	Started time.Time `json:"started"` // of the process
	UptimeS float64   `json:"uptime_s"`
	Version string    `json:"version,omitempty"`
}

func (s *Server) identity(w http.ResponseWriter, _ *http.Request) {
	id := Identity{Address: s.Addr(), Config: s.opt.ConfigPath, PID: os.Getpid(), Started: s.started.UTC(),
		UptimeS: round(time.Since(s.started).Seconds()), Version: s.opt.Version}
	if s.opt.ClientAddr != nil {
		id.Listen = s.opt.ClientAddr()
	}
	answer(w, http.StatusOK, id)
}

// Identity returns which router the client talks to.
func (c *Client) Identity(ctx context.Context) (*Identity, error) {
	var v Identity
	if err := c.get(ctx, "/admin/v1/router", &v); err != nil {
		return nil, err
	}
	return &v, nil
}
