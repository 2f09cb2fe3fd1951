package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Sample renders every field but workers and models as commented lines of YAML
// with their defaults, for a file to begin with.
func Sample() string {
	var b strings.Builder
	group := ""
	leaves(reflect.ValueOf(Default()).Elem(), "", func(path string, v reflect.Value, tag reflect.StructTag) {
		if tag.Get("secret") != "" || v.Kind() == reflect.String && v.Len() == 0 || v.Kind() == reflect.Slice || path == "pd.family" {
			return
		}
		parent, name, nested := strings.Cut(path, ".")
		indent := ""
		if nested {
			if indent = "  "; parent != group {
				group = parent
				fmt.Fprintf(&b, "# %s:\n", group)
			}
		} else {
			name = parent
		}
		line := "# " + indent + name + ": " + scalarYAML(v, tag)
		if words := tag.Get("oneof"); words != "" {
			line = fmt.Sprintf("%-34s # %s", line, strings.ReplaceAll(words, " ", ", "))
		}
		b.WriteString(line + "\n")
	})
	return b.String()
}

// scalarYAML is a field's value as setScalar reads it.
func scalarYAML(v reflect.Value, tag reflect.StructTag) string {
	if d, ok := v.Interface().(time.Duration); ok {
		text := d.String()
		if strings.HasSuffix(text, "m0s") {
			text = text[:len(text)-2]
		}
		return text
	}
	if tag.Get("unit") == "bytes" {
		n := v.Int()
		for _, u := range []struct {
			size int64
			name string
		}{{1 << 30, "GiB"}, {1 << 20, "MiB"}, {1 << 10, "KiB"}} {
			if n >= u.size && n%u.size == 0 {
				return strconv.FormatInt(n/u.size, 10) + u.name
			}
		}
	}
	return fmt.Sprint(v.Interface())
}
