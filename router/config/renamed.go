package config

import (
	"fmt"
	"reflect"
	"strings"
)

// A field whose name in the file changed keeps its old name for one release: the tag was of
// its struct field. Files, environment variables and --set accept the old name with a
// warning. Old and new name in one place are an error.

// Renamed is an old name of a field and the present one, as paths: "pd.cut_after". The
// entries of a list have the path "discovery.dns[].least".
type Renamed struct{ Old, New string }

// RenamedFields lists all fields that have an old name, those of renamed groups included.
func RenamedFields() []Renamed { return renamedFields(reflect.TypeFor[Config](), "", "") }

func renamedFields(t reflect.Type, old, path string) (list []Renamed) {
	for _, f := range fieldsOf(t) {
		name := f.Tag.Get("yaml")
		was := f.Tag.Get("was")
		if was == "" {
			was = name
		}
		was, name = joinPath(old, was), joinPath(path, name)
		elem := f.Type
		switch {
		case elem.Kind() == reflect.Slice && elem.Elem().Kind() == reflect.Struct:
			elem, was, name = elem.Elem(), was+"[]", name+"[]"
		case elem.Kind() == reflect.Pointer:
			elem = elem.Elem()
		}
		if elem.Kind() == reflect.Struct {
			list = append(list, renamedFields(elem, was, name)...)
		} else if was != name {
			list = append(list, Renamed{was, name})
		}
	}
	return list
}

// oldPaths maps the old path of each field that one text can set to its present path.
func oldPaths() map[string]string {
	m := map[string]string{}
	for _, r := range RenamedFields() {
		if !strings.Contains(r.Old, "[]") {
			m[r.Old] = r.New
		}
	}
	return m
}

// renamedWarning is the warning of an old name at a place.
func renamedWarning(at, old, present string) string {
	return fmt.Sprintf("%s: %s is now named %s; the old name is accepted in this release only", at, old, present)
}

// given records the name by which each field was set in one layer: a mapping of the file, the
// environment, or the flags.
type given map[string]string

// conflict records that path was set by name. If the same layer has set it by another name, conflict
// returns that name and true.
func (g given) conflict(path, name string) (before string, conflicts bool) {
	before, exists := g[path]
	g[path] = name
	return before, exists && before != name
}
