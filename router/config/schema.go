package config

import (
	_ "embed"
	"reflect"
)

// schema is written by TestDocsSchema -rewrite from the types and the comments of this package.
//
//go:embed schema.json
var schema []byte

// Schema returns the JSON Schema (draft 2020-12) of the configuration file. The caller must not change
// it.
func Schema() []byte { return schema }

// PrintDefaults returns every field that has a default, with its default, as the YAML of a
// configuration file. workers, models and lists have none; pd.family depends on the workers.
func PrintDefaults() string {
	set := map[string]string{}
	forEachField(reflect.ValueOf(Default()).Elem(), "", func(path string, v reflect.Value, tag reflect.StructTag) {
		if tag.Get("secret") == "" && (v.Kind() != reflect.String || v.Len() > 0) && v.Kind() != reflect.Slice && path != "pd.family" {
			set[path] = scalarYAML(v, tag)
		}
	})
	return Sample(set)
}
