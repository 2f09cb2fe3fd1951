package config

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// Sample returns a configuration file to start from: the fields of set, which maps paths to values,
// and all other fields but workers and models as comments with their defaults.
func Sample(set map[string]string) string {
	var b strings.Builder
	group := ""
	forEachField(reflect.ValueOf(Default()).Elem(), "", func(path string, v reflect.Value, tag reflect.StructTag) {
		value, isSet := set[path]
		if !isSet {
			if tag.Get("secret") != "" || v.Kind() == reflect.String && v.Len() == 0 || v.Kind() == reflect.Slice || path == "pd.family" {
				return
			}
			value = scalarYAML(v, tag)
		}
		parent, name, nested := strings.Cut(path, ".")
		if !nested {
			name = parent
		} else if parent != group {
			group = parent
			if !anyBelow(set, group) {
				b.WriteString("# ")
			}
			b.WriteString(group + ":\n")
		}
		line := name + ": " + value
		switch {
		case isSet && nested:
			line = "  " + line
		case isSet:
		case nested && anyBelow(set, group):
			line = "  # " + line
		case nested:
			line = "#   " + line
		default:
			line = "# " + line
		}
		if words := tag.Get("oneof"); words != "" {
			line = fmt.Sprintf("%-34s # %s", line, strings.ReplaceAll(words, " ", ", "))
		}
		b.WriteString(line + "\n")
	})
	return b.String()
}

func anyBelow(set map[string]string, group string) bool {
	for path := range set {
		if strings.HasPrefix(path, group+".") {
			return true
		}
	}
	return false
}

// scalarYAML formats a field's value in the syntax that setScalar reads.
func scalarYAML(v reflect.Value, tag reflect.StructTag) string {
	if d, ok := v.Interface().(time.Duration); ok {
		if d < 0 && tag.Get("off") != "" {
			return "off"
		}
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
