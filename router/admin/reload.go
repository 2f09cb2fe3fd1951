package admin

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"

	"sluice/router/config"
)

// reload responds with the changes, or with the error in the configuration file. A client that
// disconnects does not stop the reload.
func (s *Server) reload(w http.ResponseWriter, r *http.Request) {
	if s.opt.Reload == nil {
		fail(w, http.StatusNotFound, "no_reload", "this router cannot reload its configuration")
		return
	}
	dry := false
	if v := r.URL.Query().Get("dry_run"); v != "" {
		var err error
		if dry, err = strconv.ParseBool(v); err != nil {
			fail(w, http.StatusBadRequest, "bad_parameter", fmt.Sprintf("dry_run=%q is not a boolean; want true or false", v))
			return
		}
	}
	changes, err := s.opt.Reload(context.WithoutCancel(r.Context()), dry)
	if err != nil {
		fail(w, http.StatusUnprocessableEntity, "not_reloaded", err.Error())
		return
	}
	if changes == nil {
		changes = []config.Change{}
	}
	answer(w, http.StatusOK, map[string]any{"changes": changes})
}

// Reload makes the router apply its configuration file and returns the changes. With dry it
// changes nothing.
func (c *Client) Reload(ctx context.Context, dry bool) ([]config.Change, error) {
	body, err := c.Do(ctx, http.MethodPost, "/admin/v1/reload?dry_run="+strconv.FormatBool(dry))
	if err != nil {
		return nil, err
	}
	var v struct {
		Changes []config.Change `json:"changes"`
	}
	if err := json.Unmarshal(body, &v); err != nil {
		return nil, fmt.Errorf("admin: cannot read the answer to the reload: %w", err)
	}
	return v.Changes, nil
}
