package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// restartTimeout is longer than the longest start of a new process (timeouts.restart).
const restartTimeout = 11 * time.Minute

// restart responds when the new process serves, or with the reason that it does not. A client that
// disconnects does not stop the restart.
func (s *Server) restart(w http.ResponseWriter, r *http.Request) {
	if s.opt.Restart == nil {
		fail(w, http.StatusNotFound, "no_restart", "this router cannot be replaced while it runs")
		return
	}
	if err := http.NewResponseController(w).SetWriteDeadline(time.Now().Add(restartTimeout)); err != nil {
		fail(w, http.StatusInternalServerError, "internal", err.Error())
		return
	}
	pid, err := s.opt.Restart(context.WithoutCancel(r.Context()))
	if err != nil {
		fail(w, http.StatusConflict, "not_restarted", err.Error())
		return
	}
	answer(w, http.StatusOK, map[string]int{"pid": pid})
}

// Restart replaces the router's process and returns the id of the new process.
func (c *Client) Restart(ctx context.Context) (pid int, err error) {
	patient := *c
	h := *c.http
	h.Timeout = restartTimeout
	patient.http = &h
	body, err := patient.Do(ctx, http.MethodPost, "/admin/v1/restart")
	if err != nil {
		return 0, err
	}
	var v struct {
		PID int `json:"pid"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return 0, fmt.Errorf("admin: cannot read the answer to the restart: %w", err)
	}
	return v.PID, nil
}
