//go:build !cgo || !linux

package tokenizer

import (
	"time"

	"sluice/native/dl"
)

// Library is never loaded in a build without C code.
type Library struct{}

// Open always fails in a build without C code.
func Open(path string) (*Library, error) {
	return nil, &LoadError{[]Attempt{{Path: candidates(path)[0], Code: dl.LoadNoNative, Reason: dl.ErrNoCgo.Error()}}}
}

// Path is empty in a build without C code.
func (l *Library) Path() string { return "" }

// Version is empty in a build without C code.
func (l *Library) Version() string { return "" }

// SelfTest always fails in a build without C code.
func (l *Library) SelfTest() error { return dl.ErrNoCgo }

// Model is never loaded in a build without C code.
type Model struct{}

// Load always fails in a build without C code.
func (l *Library) Load(string, LoadOptions) (*Model, error) { return nil, dl.ErrNoCgo }

// Info is empty in a build without C code.
func (m *Model) Info() Info { return Info{} }

// SpecialTokens is empty in a build without C code.
func (m *Model) SpecialTokens() []SpecialToken { return nil }

// Spec is empty in a build without C code.
func (m *Model) Spec() []byte { return nil }

// SetTimeout does nothing in a build without C code.
func (m *Model) SetTimeout(time.Duration) {}

// Close does nothing in a build without C code.
func (m *Model) Close() {}

// Render always fails in a build without C code.
func (m *Model) Render(dst []byte, _ string, _ []byte) ([]byte, error) { return dst, dl.ErrNoCgo }

// Encode always fails in a build without C code.
func (m *Model) Encode(dst []uint32, _ []byte, _ bool) ([]uint32, error) { return dst, dl.ErrNoCgo }

// Prompt always fails in a build without C code.
func (m *Model) Prompt(dst []uint32, _ string, _ []byte, _ bool, _ func([]byte) []byte) ([]uint32, error) {
	return dst, dl.ErrNoCgo
}
