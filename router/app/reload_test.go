package app

import (
	"reflect"
	"sluice/router/config"
	"strings"
	"testing"
	"time"
)

// TestReloadedFieldsReachTheRouter changes each field of the configuration alone. The options of the
// parts of a running router must change if, and only if, config.Reloadable reports the field.
func TestReloadedFieldsReachTheRouter(t *testing.T) {
	base := func() *config.Config {
		c := config.Default()
		c.CORS.Origins = []string{"https://a.example"} // without origins the other cors fields have no effect
		c.Proxies.Trusted = []string{"10.0.0.0/8"}
		return c
	}
	before, err := reloadableOf(base())
	if err != nil {
		t.Fatal(err)
	}
	changed := map[string]int{}
	forEachField(reflect.ValueOf(base()).Elem(), "", func(path string, index [][]int, tag reflect.StructTag) {
		next := base()
		v := reflect.ValueOf(next).Elem()
		for _, i := range index {
			v = v.FieldByIndex(i)
		}
		if !differentValue(v, tag) {
			t.Errorf("%s: no other value of a %s", path, v.Type())
			return
		}
		merged, err := base().Apply(next)
		if err != nil { // one of two fields that must be set together
			merged = next
			if !config.Reloadable(path) {
				return
			}
		}
		after, err := reloadableOf(merged)
		if err != nil {
			t.Fatal(err)
		}
		if is := !reflect.DeepEqual(before, after); is != config.Reloadable(path) {
			t.Errorf("%s: it reaches the running router: %v; config.Reloadable says %v", path, is, config.Reloadable(path))
		}
		changed[path]++
	})
	if len(changed) < 100 {
		t.Errorf("only %d fields were changed", len(changed))
	}
}

func forEachField(v reflect.Value, path string, f func(path string, index [][]int, tag reflect.StructTag), above ...[]int) {
	for _, field := range reflect.VisibleFields(v.Type()) {
		name := field.Tag.Get("yaml")
		if name == "" {
			continue
		}
		sub := strings.TrimPrefix(path+"."+name, ".")
		at := append(append([][]int{}, above...), field.Index)
		switch fv := v.FieldByIndex(field.Index); {
		case fv.Kind() == reflect.Struct:
			forEachField(fv, sub, f, at...)
		case fv.Kind() == reflect.Map, fv.Kind() == reflect.Pointer, fv.Kind() == reflect.Slice && fv.Type().Elem().Kind() != reflect.String:
			// models, workers, api_keys: the tests of package config cover these
		default:
			f(sub, at, field.Tag)
		}
	}
}

// differentValue sets v to another value that has an effect on its part of the router.
func differentValue(v reflect.Value, tag reflect.StructTag) bool {
	switch v.Kind() {
	case reflect.String:
		for _, word := range strings.Fields(tag.Get("oneof")) {
			if word != v.String() {
				v.SetString(word)
				return true
			}
		}
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int, reflect.Int64:
		v.SetInt(v.Int() + int64(2*time.Second))
	case reflect.Uint16:
		v.SetUint(v.Uint() + 1)
	case reflect.Float64:
		v.SetFloat(v.Float() + 0.125)
	case reflect.Slice:
		v.Set(reflect.ValueOf([]string{"192.0.2.0/24"}))
	default:
		return false
	}
	return true
}
