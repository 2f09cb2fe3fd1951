package access

import (
	"reflect"
	"strings"
	"testing"

	"sluice/router/config"
	"sluice/router/obs"
)

// TestSecretFieldsAreMasked: the admin API and the logs, which recognise secrets by name, mask every
// field that the configuration marks as a secret.
func TestSecretFieldsAreMasked(t *testing.T) {
	found := 0
	var walk func(typ reflect.Type, path []string)
	walk = func(typ reflect.Type, path []string) {
		for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice || typ.Kind() == reflect.Map {
			typ = typ.Elem()
		}
		if typ.Kind() != reflect.Struct {
			return
		}
		for i := range typ.NumField() {
			f := typ.Field(i)
			name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
			if name == "" || name == "-" {
				continue
			}
			path := append(path[:len(path):len(path)], name)
			if f.Tag.Get("secret") == "true" {
				found++
				masked := false
				for _, p := range path {
					masked = masked || obs.IsSecret(p)
				}
				if !masked {
					t.Errorf("%s is a secret and obs.IsSecret knows no part of its path", strings.Join(path, "."))
				}
			}
			walk(f.Type, path)
		}
	}
	walk(reflect.TypeFor[config.Config](), nil)
	if found < 5 {
		t.Errorf("only %d secrets found", found)
	}
}
