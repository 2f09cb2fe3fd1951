//go:build cgo && linux

package tokenizer

/*
#include "tokenizer/loader.h"
*/
import "C"

import (
	"slices"
	"time"
)

// Prompt renders a request like Render, encodes the part of the text that rest returns, and
// appends its ids to dst. It is one bounded call: one place among the calls that run at once, one
// hand-over to a thread and one timeout, and the text stays in the library's memory.
//
// rest is called once with the rendered text, which is valid until it returns, on the thread of
// the call, and returns the part of it to encode, or nil for nothing. It must not wait. addSpecial
// is that of Encode.
//
// After an error the call may still run: then input and what rest refers to belong to it, and the
// caller must not change them. The error is an *Error or ErrClosed.
func (m *Model) Prompt(dst []uint32, template string, input []byte, addSpecial bool, rest func(text []byte) []byte) ([]uint32, error) {
	flags := C.uint32_t(0)
	if addSpecial {
		flags = C.SLUICE_TOK_ADD_SPECIAL
	}
	if len(input) > shortInput {
		j := &job{input: input, template: template, out: new(C.struct_sluice_tok_result)}
		err := m.run(j, "prompt", func(j *job, left time.Duration) {
			_, j.ids, j.err = m.prompt(nil, j.template, j.input, flags|C.SLUICE_TOK_ADMIT, left, rest, 0)
		})
		if err != nil {
			return dst, err
		}
		return append(dst, j.ids...), nil
	}
	var later []byte
	ids := dst
	err := m.runHere("prompt", func() (err error) {
		later, ids, err = m.prompt(dst, template, input, flags, m.limit(), rest, shortInput)
		return err
	})
	switch {
	case err != nil:
		return dst, err
	case later != nil: // too long for this thread, or this thread may not encode
		return m.Encode(dst, later, addSpecial)
	}
	return ids, nil
}

// prompt renders and encodes on this thread. A part that is longer than most bytes (0: no bound), or
// that the thread may not encode, is returned as a copy instead.
func (m *Model) prompt(dst []uint32, template string, input []byte, flags C.uint32_t, left time.Duration, rest func([]byte) []byte, most int) (later []byte, ids []uint32, err error) {
	var rendered, out C.struct_sluice_tok_result
	if err := m.render(template, input, left, &rendered); err != nil {
		return nil, dst, err
	}
	defer C.sluice_tokenizer_free(&rendered)
	part := rest(text(&rendered))
	if part == nil {
		return nil, dst, nil
	}
	if most > 0 && len(part) > most {
		return slices.Clone(part), dst, nil // not nil, for it is not empty
	}
	dst = slices.Grow(dst, len(part)/3+16)
	err = m.encode(dst[len(dst):cap(dst)], part, flags, &out)
	if e, ok := err.(*Error); ok && e.Code == codeThread {
		return append([]byte{}, part...), dst, nil
	}
	if err != nil {
		return nil, dst, err
	}
	defer C.sluice_tokenizer_free(&out)
	return nil, appendIDs(dst, dst[len(dst):cap(dst)], &out), nil
}
