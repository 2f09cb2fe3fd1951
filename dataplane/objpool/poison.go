package objpool

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"unsafe"
)

// Pattern is the byte that fills released memory. It is not valid in UTF-8, so a body that
// contains it is not valid JSON either.
const Pattern = 0xDB

// checksEnabled says whether released memory is poisoned and verified.
var checksEnabled = raceEnabled

// EnableChecks turns checking on permanently. Tests call it from a package's init, before any
// object is pooled. It has no effect if the test binary runs benchmarks.
func EnableChecks() {
	if !slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.bench=") }) {
		checksEnabled = true
	}
}

// ChecksEnabled reports whether checking is on.
func ChecksEnabled() bool { return checksEnabled }

// Poison fills b, which has been released, with Pattern.
func Poison(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = Pattern
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// pattern is the block that VerifyPoison compares memory with, piece by piece.
var pattern = func() (b [64 << 10]byte) {
	Poison(b[:])
	return b
}()

// VerifyPoison panics if b has changed since Poison filled it. what names the object in the
// panic's text.
func VerifyPoison(b []byte, what string) {
	for from := 0; from < len(b); from += len(pattern) {
		piece := b[from:min(from+len(pattern), len(b))]
		if bytes.Equal(piece, pattern[:len(piece)]) {
			continue
		}
		at := 0
		for piece[at] == Pattern {
			at++
		}
		text, _, _ := bytes.Cut(piece[at:min(at+40, len(piece))], []byte{Pattern})
		panic(fmt.Sprintf("objpool: %s was written to after its release: byte %d of %d is %#x (%q)", what, from+at, len(b), piece[at], text))
	}
}

// checkObject poisons or verifies the memory of v that the next holder writes before it reads
// it: all of an array of bytes, and in a struct the capacity of number slices beyond their
// length. It does not follow pointers, strings, maps and interfaces, because other objects
// may share what they refer to. It leaves arrays and other fields of a struct alone.
func checkObject(v reflect.Value, verify bool, what string) {
	if v.Kind() == reflect.Array && v.Type().Elem().Kind() == reflect.Uint8 && v.Len() > 0 {
		checkField(unsafe.Slice((*byte)(v.Addr().UnsafePointer()), v.Len()), verify, what)
		return
	}
	walk(v, verify, what)
}

func walk(v reflect.Value, verify bool, what string) {
	switch v.Kind() {
	case reflect.Struct:
		for i := range v.NumField() {
			walk(v.Field(i), verify, what)
		}
	case reflect.Array:
		if v.Type().Elem().Kind() == reflect.Struct {
			for i := range v.Len() {
				walk(v.Index(i), verify, what)
			}
		}
	case reflect.Slice:
		if size := int(v.Type().Elem().Size()); isNumber(v.Type().Elem().Kind()) && v.Cap() > v.Len() {
			checkField(unsafe.Slice((*byte)(v.UnsafePointer()), v.Cap()*size)[v.Len()*size:], verify, what)
		}
	}
}

func checkField(b []byte, verify bool, what string) {
	if verify {
		VerifyPoison(b, what)
	} else {
		Poison(b)
	}
}

func isNumber(k reflect.Kind) bool { return k >= reflect.Int && k <= reflect.Complex128 }
