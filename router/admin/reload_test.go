package admin

import (
	"errors"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"sluice/router/config"
)

func TestReload(t *testing.T) {
	f := start(t, nil)
	c := f.client
	want := []config.Change{{Path: "timeouts.decode", Old: "10m", New: "1m", Effect: config.Applied}}
	for _, dry := range []bool{true, false} {
		if got, err := c.Reload(t.Context(), dry); err != nil || !reflect.DeepEqual(got, want) || f.dry != dry {
			t.Errorf("dry %v: %v, %v; the router got %v", dry, got, err, f.dry)
		}
	}
	f.reloadFails = errors.New("sluice.yaml:3:5: limits.max_body: nonsense")
	var wrong *Error
	if _, err := c.Reload(t.Context(), false); !errors.As(err, &wrong) || wrong.Status != http.StatusUnprocessableEntity || !strings.Contains(err.Error(), "sluice.yaml:3:5") {
		t.Errorf("%v", err)
	}
	if code, _, body := f.call(t, "POST", "/admin/v1/reload?dry_run=perhaps", bearer(testToken)); code != 400 || !strings.Contains(body, "perhaps") {
		t.Errorf("%d %s", code, body)
	}
	for method, path := range map[string]string{"GET": "/admin/v1/reload", "DELETE": "/admin/v1/workers"} {
		code, h, body := f.call(t, method, path, bearer(testToken))
		if want := map[string]string{"GET": "POST", "DELETE": "GET, HEAD"}[method]; code != 405 || h.Get("Allow") != want || !strings.Contains(body, "wrong_method") {
			t.Errorf("%s %s: %d, Allow %q, %s", method, path, code, h.Get("Allow"), body)
		}
		if code, h, _ := f.call(t, method, path, nil); code != 401 || h.Get("Allow") != "" {
			t.Errorf("%s %s without the token: %d", method, path, code)
		}
	}
}
