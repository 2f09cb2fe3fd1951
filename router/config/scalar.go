package config

import (
	"encoding"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
)

var durationType = reflect.TypeFor[time.Duration]()

// setScalar parses text into a field by its type and tags. The error gives the value and what is
// accepted; the caller adds the place.
func setScalar(v reflect.Value, tag reflect.StructTag, text string) error {
	if u, ok := v.Addr().Interface().(encoding.TextUnmarshaler); ok {
		if err := u.UnmarshalText([]byte(text)); err != nil {
			return fmt.Errorf("%s", strings.TrimPrefix(err.Error(), "worker: "))
		}
		return nil
	}
	shown := quoted(text)
	if tag.Get("secret") != "" {
		shown = "(hidden)"
	}
	switch {
	case v.Type() == durationType:
		if text == "off" && tag.Get("off") != "" {
			v.SetInt(-1)
			return nil
		}
		if unit := tag.Get("bare"); unit != "" && strings.Trim(text, "0123456789") == "" {
			text += unit // flags of the same names in other routers accept a number of seconds
		}
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%s is not a duration; want %s", shown, rangeText("a number with a unit, such as 500ms, 5s or 2m", tag))
		}
		return checkRange(d, tag, shown, func(s string) time.Duration { return mustParse(time.ParseDuration(s)) }, func() { v.SetInt(int64(d)) })
	case tag.Get("unit") == "bytes":
		n, err := parseBytes(text)
		if err != nil {
			return fmt.Errorf("%s is not a size; want %s", shown, rangeText("a number of bytes, or one with a unit, such as 32MiB or 1GiB", tag))
		}
		return checkRange(n, tag, shown, func(s string) int64 { return mustParse(parseBytes(s)) }, func() { v.SetInt(n) })
	}
	switch v.Kind() {
	case reflect.String:
		if words := strings.Fields(tag.Get("oneof")); len(words) > 0 && !contains(words, text) {
			return fmt.Errorf("%s is not known%s; want %s", shown, suggestion(text, words), strings.Join(words, ", "))
		}
		v.SetString(text)
	case reflect.Bool:
		switch strings.ToLower(text) {
		case "true", "yes", "on":
			v.SetBool(true)
		case "false", "no", "off":
			v.SetBool(false)
		default:
			return fmt.Errorf("%s is not a boolean; want true or false", shown)
		}
	case reflect.Int, reflect.Int64, reflect.Uint16:
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil || v.Kind() == reflect.Uint16 && (n < 0 || n > math.MaxUint16) {
			what := "a whole number"
			if v.Kind() == reflect.Uint16 {
				what += " from 0 to 65535"
			}
			return fmt.Errorf("%s is not a number; want %s", shown, rangeText(what, tag))
		}
		return checkRange(n, tag, shown, func(s string) int64 { return mustParse(strconv.ParseInt(s, 10, 64)) }, func() {
			if v.CanInt() {
				v.SetInt(n)
			} else {
				v.SetUint(uint64(n))
			}
		})
	case reflect.Float64:
		x, err := strconv.ParseFloat(text, 64)
		if err != nil || math.IsNaN(x) || math.IsInf(x, 0) {
			return fmt.Errorf("%s is not a finite number; want %s", shown, rangeText("a number", tag))
		}
		return checkRange(x, tag, shown, func(s string) float64 { return mustParse(strconv.ParseFloat(s, 64)) }, func() { v.SetFloat(x) })
	default:
		panic("config: a field of kind " + v.Kind().String() + " has no reader") // a mistake in the struct, which every test finds
	}
	return nil
}

// checkRange calls set if x is within the bounds of the tags min and max, and returns an error
// otherwise.
func checkRange[T int64 | float64 | time.Duration](x T, tag reflect.StructTag, shown string, parse func(string) T, set func()) error {
	if lo := tag.Get("min"); lo != "" && x < parse(lo) {
		return fmt.Errorf("%s is too small; want %s", shown, rangeText("", tag))
	}
	if hi := tag.Get("max"); hi != "" && x > parse(hi) {
		return fmt.Errorf("%s is too large; want %s", shown, rangeText("", tag))
	}
	set()
	return nil
}

// rangeText describes the values that a field accepts.
func rangeText(what string, tag reflect.StructTag) string {
	var parts []string
	if what != "" {
		parts = append(parts, what)
	}
	switch lo, hi := tag.Get("min"), tag.Get("max"); {
	case lo != "" && hi != "":
		parts = append(parts, "from "+lo+" to "+hi)
	case lo != "":
		parts = append(parts, lo+" or more")
	}
	if tag.Get("off") != "" {
		parts = append(parts, `or "off"`)
	}
	return strings.Join(parts, ", ")
}

// parseBytes parses a number of bytes with an optional unit: 1024, 32MiB, 1.5GiB, 1GB.
func parseBytes(s string) (int64, error) {
	n, err := humanize.ParseBytes(s)
	if err != nil || n > math.MaxInt64 {
		return 0, fmt.Errorf("not a size: %s", quoted(s))
	}
	return int64(n), nil
}

// mustParse returns v and panics on an error. It is for literals in struct tags, which every test
// parses.
func mustParse[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
