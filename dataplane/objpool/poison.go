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

// Pattern is what released memory is filled with: no UTF-8, so no JSON.
const Pattern = 0xDB

// checksEnabled is whether released memory is filled and looked at again.
var checksEnabled = raceEnabled

// EnableChecks turns the checking on, for good. Tests call it before anything is pooled, from a
// package's init. While benchmarks run it does nothing.
func EnableChecks() {
	if !slices.ContainsFunc(os.Args, func(a string) bool { return strings.HasPrefix(a, "-test.bench=") }) {
		checksEnabled = true
	}
}

// ChecksEnabled says whether the checking is on.
func ChecksEnabled() bool { return checksEnabled }

// Poison fills b, memory that has been released.
func Poison(b []byte) {
	if len(b) == 0 {
		return
	}
	b[0] = Pattern
	for n := 1; n < len(b); n *= 2 {
		copy(b[n:], b[:n])
	}
}

// pattern is what Verify compares with, a piece at a time.
var pattern = func() (b [64 << 10]byte) {
	Poison(b[:])
	return b
}()

// VerifyPoison panics when b, memory that is lent again, is not as Poison left it.
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

// checkObject poisons or verifies the memory of a pooled object that its next holder writes
// before it reads: all of an array of bytes, of a struct the part behind the length of its
// slices of numbers. Pointers, strings, maps and interfaces are not followed: what they lead
// to may be shared. A struct's arrays and other fields are as its owner left them, mostly
// zero.
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
