//go:build cgo && linux

package tokenizer

/*
#cgo CFLAGS: -I${SRCDIR}/.. -std=gnu11 -Wall -Wextra -Wno-unused-parameter -O2
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "tokenizer/loader.h"
*/
import "C"

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"sluice/native/dl"
)

// Library is the loaded library.
type Library struct {
	path string
	work chan func()   // to the threads that make long calls
	here chan struct{} // one element for each call on its caller's thread
	long chan struct{} // one element for each call with more than longInput
}

// shortInput bounds the bytes of a call that is made on its caller's thread: handing it
// to another one would take longer than the call. Such a call ends by itself: a template looks at the
// time, each of its operations is bounded (src/bounds.rs), and so is the text that is encoded.
const shortInput = 64 << 10

// longInput bounds the bytes of a call that any of the threads makes. At most half of them make longer
// ones: a call cannot be interrupted, and such a one can take seconds.
const longInput = 1 << 20

// slowPause is how long texts of at least the length of one that took longer to encode than the timeout are not
// tried. Its caller had left, and each further one would use a processor without effect, too. Texts up to shortInput are
// always tried.
const slowPause = 10 * time.Second

// maxThreads bounds the threads that make calls: the encoder keeps words in memory of the
// thread, up to some tens of MiB, so calls from any thread would use memory without bound.
const maxThreads = 8

// start starts the threads, which live as long as the process, as the library does.
func (l *Library) start() {
	n := max(1, min(runtime.GOMAXPROCS(0), maxThreads))
	l.work, l.here, l.long = make(chan func()), make(chan struct{}, n), make(chan struct{}, max(1, n/2))
	for range n {
		go func() {
			runtime.LockOSThread()
			for call := range l.work {
				call()
			}
		}()
	}
}

// process is the one library of the process.
var process struct {
	sync.Mutex
	library *Library
}

// Open loads the library from path. "" looks in the file that SLUICE_TOKENIZER_LIBRARY
// names, or else beside the binary, on the loader's search path (LD_LIBRARY_PATH) and in
// /usr/lib/sluice. The error is a *LoadError. Later calls return the same library.
func Open(path string) (*Library, error) {
	process.Lock()
	defer process.Unlock()
	if path == "" && process.library != nil {
		return process.library, nil
	}
	var e LoadError
	for _, p := range candidates(path) {
		code, why := load(p)
		if code == dl.LoadOK {
			if process.library == nil {
				process.library = &Library{path: why}
				process.library.start()
			}
			return process.library, nil
		}
		e.Attempts = append(e.Attempts, Attempt{Path: p, Code: code, Reason: why})
	}
	return nil, &e
}

func load(path string) (dl.LoadCode, string) {
	p, why := C.CString(path), (*C.char)(C.malloc(dl.ReasonSize))
	defer C.free(unsafe.Pointer(p))
	defer C.free(unsafe.Pointer(why))
	code := C.sluice_tokenizer_load(p, why, dl.ReasonSize)
	return dl.LoadCode(code), C.GoString(why)
}

// Path returns the file that was loaded.
func (l *Library) Path() string { return l.path }

// Version returns the versions of the library and of what it is made of.
func (l *Library) Version() string { return C.GoString(C.sluice_tokenizer_version()) }

// SelfTest loads a model with two tokens, renders a template and encodes the text.
func (l *Library) SelfTest() error {
	dir, err := os.MkdirTemp("", "sluice-tokenizer-*")
	// In a container the root file system may be read-only, /tmp included.
	for _, parent := range []string{os.Getenv("XDG_RUNTIME_DIR"), "/dev/shm"} {
		if err != nil && parent != "" {
			dir, err = os.MkdirTemp(parent, "sluice-tokenizer-*")
		}
	}
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "tokenizer.json"), []byte(selfTestModel()), 0o600); err != nil {
		return err
	}
	m, err := l.Load(dir, LoadOptions{})
	if err != nil {
		return err
	}
	defer m.Close()
	text, err := m.Render(nil, "{% for m in messages %}{{ m.content }}{% endfor %}", []byte(`{"messages":[{"content":"a"},{"content":"b"}]}`))
	if err != nil {
		return err
	}
	ids, err := m.Encode(nil, text, false)
	if err == nil && !slices.Equal(ids, []uint32{1, 2}) {
		err = fmt.Errorf("tokenizer: the ids of %q are %v, want [1 2]", text, ids)
	}
	return err
}

// Model is a loaded model. Its methods may be called from any goroutine.
type Model struct {
	library *Library
	timeout atomic.Int64 // a time.Duration
	info    Info
	special []SpecialToken
	spec    json.RawMessage
	slow    slowTexts

	mu     sync.Mutex
	model  *C.struct_sluice_tok_model // nil when closed and no call runs
	calls  int                        // calls that run
	closed bool
}

// Load reads the model in a folder. It takes up to some seconds.
func (l *Library) Load(dir string, opt LoadOptions) (*Model, error) {
	d := C.CString(dir)
	defer C.free(unsafe.Pointer(d))
	var options C.struct_sluice_tok_options
	options.size = C.size_t(unsafe.Sizeof(options))
	options.max_input, options.max_output = C.uint64_t(max(0, opt.MaxInput)), C.uint64_t(max(0, opt.MaxOutput))
	if opt.Reference {
		options.flags = C.SLUICE_TOK_REFERENCE
	}
	m := &Model{library: l}
	m.SetTimeout(opt.Timeout)
	var out C.struct_sluice_tok_result
	if err := failure("load", C.sluice_tokenizer_open_model(d, &options, &m.model, &out), &out); err != nil {
		return nil, err
	}
	for what, v := range []any{&m.info, &m.special, &m.spec} {
		if what == 2 && (m.info.Format == "" || m.info.Format == "tokenizer.json") {
			break
		}
		if err := m.describe(what, v); err != nil {
			m.Close()
			return nil, err
		}
	}
	return m, nil
}

func (m *Model) describe(what int, v any) error {
	var out C.struct_sluice_tok_result
	if err := failure("describe", C.sluice_tokenizer_info(m.model, C.uint32_t(what), &out), &out); err != nil {
		return err
	}
	defer C.sluice_tokenizer_free(&out)
	if err := json.Unmarshal(text(&out), v); err != nil {
		return &Error{Verb: "describe", Code: CodeUnsupported, Reason: err.Error()}
	}
	return nil
}

// SetTimeout changes the timeout of the calls that begin from now on; 0 is the default of LoadOptions.
func (m *Model) SetTimeout(d time.Duration) {
	m.timeout.Store(int64(cmp.Or(d, 10*time.Second)))
	m.slow.until.Store(0)
}

func (m *Model) limit() time.Duration { return time.Duration(m.timeout.Load()) }

// Info describes the model.
func (m *Model) Info() Info { return m.info }

// SpecialTokens returns the added tokens in the order of their ids. The slice is shared.
func (m *Model) SpecialTokens() []SpecialToken { return m.special }

// Spec returns the tokenizer.json that the model's file was converted to, without its vocabulary
// and merges; nil if the folder has a tokenizer.json, which then has all.
func (m *Model) Spec() []byte {
	return m.spec
}

// Close releases the model when the last call on it has ended.
func (m *Model) Close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.closed = true
	m.release()
}

// release frees a closed model that no call uses. The caller holds mu.
func (m *Model) release() {
	if m.closed && m.calls == 0 && m.model != nil {
		C.sluice_tokenizer_close_model(m.model)
		m.model = nil
	}
}

func (m *Model) begin() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return ErrClosed
	}
	m.calls++
	return nil
}

func (m *Model) end() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.calls--
	m.release()
}

// job is one call. It owns what the library reads and writes, because its caller may
// have left before the call ends.
type job struct {
	input    []byte
	template string
	ids      []uint32
	err      error
	out      *C.struct_sluice_tok_result // apart: C must not see the job's other pointers
	done     chan struct{}
	result   sync.Mutex // guards left and whether out is freed
	left     bool
}

// runHere makes a call on this thread. At most as many run at once as there are threads
// for long calls. It has no timer of its own, and cannot be left: the call has the timeout, and
// ends soon after it (shortInput), so that a place is never lost.
func (m *Model) runHere(verb string, call func() error) error {
	select {
	case m.library.here <- struct{}{}:
	default:
		limit := m.limit()
		timer := time.NewTimer(limit)
		defer timer.Stop()
		select {
		case m.library.here <- struct{}{}:
		case <-timer.C:
			return &Error{Verb: verb, Code: CodeDeadline, Reason: limit.String()}
		}
	}
	defer func() { <-m.library.here }()
	if err := m.begin(); err != nil {
		return err
	}
	defer m.end()
	return call()
}

// run executes call on one of the library's threads and waits for it, at most for the
// model's timeout. After an error the job belongs to that thread.
func (m *Model) run(j *job, verb string, call func(*job, time.Duration)) error {
	limit := m.limit()
	end := time.Now().Add(limit)
	timer := time.NewTimer(limit)
	defer timer.Stop()
	late := &Error{Verb: verb, Code: CodeDeadline, Reason: limit.String()}
	leave := func() {}
	if len(j.input) > longInput {
		select {
		case m.library.long <- struct{}{}:
			leave = func() { <-m.library.long }
		case <-timer.C:
			return late
		}
	}
	if err := m.begin(); err != nil {
		leave()
		return err
	}
	j.done = make(chan struct{})
	select {
	case m.library.work <- func() {
		call(j, max(time.Millisecond, time.Until(end)))
		leave()
		m.end()
		j.finish()
	}:
	case <-timer.C:
		leave()
		m.end()
		return late
	}
	select {
	case <-j.done:
		return j.err
	case <-timer.C:
	}
	if j.leave() {
		return late
	}
	return j.err // it ended just now
}

// finish tells the caller that the call has ended, or frees its result if there is none.
func (j *job) finish() {
	j.result.Lock()
	defer j.result.Unlock()
	if j.left {
		C.sluice_tokenizer_free(j.out)
	}
	close(j.done)
}

// leave abandons the call. It returns false if the call has ended.
func (j *job) leave() bool {
	j.result.Lock()
	defer j.result.Unlock()
	select {
	case <-j.done:
		return false
	default:
		j.left = true
		return true
	}
}

// Render renders a request with a chat template and appends the text to dst.
//
// template is the name of one of the model's templates or the source of another one;
// "" is the model's own. input is a JSON object: messages, and optionally tools,
// documents, add_generation_prompt, continue_final_message (true, or the name of a
// field), chat_template_kwargs, and now (seconds since 1970, for strftime_now). The
// meaning is that of transformers' apply_chat_template. The error is an *Error or
// ErrClosed.
func (m *Model) Render(dst []byte, template string, input []byte) ([]byte, error) {
	var out C.struct_sluice_tok_result
	if len(input) <= shortInput {
		if err := m.runHere("render", func() error { return m.render(template, input, m.limit(), &out) }); err != nil {
			return dst, err
		}
		defer C.sluice_tokenizer_free(&out)
		return append(dst, text(&out)...), nil
	}
	j := &job{input: append([]byte(nil), input...), template: template, out: new(C.struct_sluice_tok_result)}
	err := m.run(j, "render", func(j *job, left time.Duration) { j.err = m.render(j.template, j.input, left, j.out) })
	if err != nil {
		return dst, err
	}
	defer C.sluice_tokenizer_free(j.out)
	return append(dst, text(j.out)...), nil
}

func (m *Model) render(template string, input []byte, left time.Duration, out *C.struct_sluice_tok_result) error {
	code := C.sluice_tokenizer_render(m.model, (*C.uint8_t)(unsafe.StringData(template)), C.size_t(len(template)),
		(*C.uint8_t)(unsafe.SliceData(input)), C.size_t(len(input)), C.uint64_t(left), out)
	return failure("render", code, out)
}

// Encode appends the ids of a text to dst, with the special tokens that the model adds
// to a text if addSpecial is set. The text must be UTF-8. The error is an *Error or
// ErrClosed.
func (m *Model) Encode(dst []uint32, text []byte, addSpecial bool) ([]uint32, error) {
	flags := C.uint32_t(0)
	if addSpecial {
		flags = C.SLUICE_TOK_ADD_SPECIAL
	}
	if len(text) <= shortInput {
		var out C.struct_sluice_tok_result
		dst = slices.Grow(dst, len(text)/3+16)
		err := m.runHere("encode", func() error { return m.encode(dst[len(dst):cap(dst)], text, flags, &out) })
		if err == nil {
			defer C.sluice_tokenizer_free(&out)
			return appendIDs(dst, dst[len(dst):cap(dst)], &out), nil
		}
		if e, ok := err.(*Error); !ok || e.Code != codeThread {
			return dst, err
		}
	}
	j := &job{input: append([]byte(nil), text...), ids: make([]uint32, len(text)/3+16), out: new(C.struct_sluice_tok_result)}
	err := m.run(j, "encode", func(j *job, _ time.Duration) {
		j.err = m.encode(j.ids, j.input, flags|C.SLUICE_TOK_ADMIT, j.out)
	})
	if err != nil {
		return dst, err
	}
	defer C.sluice_tokenizer_free(j.out)
	return appendIDs(dst, j.ids, j.out), nil
}

// slowTexts remembers that a text took longer to encode than the model's timeout. Of two calls that end at once
// either may leave its length.
type slowTexts struct {
	bytes atomic.Int64 // the length of the shortest such text since it was last empty
	until atomic.Int64 // ns since 1970; in the past: there is none
}

// has reports whether a text of n bytes is not to be tried.
func (s *slowTexts) has(n int) bool {
	return int64(n) >= s.bytes.Load() && time.Now().UnixNano() < s.until.Load()
}

// add notes that a text of n bytes took too long.
func (s *slowTexts) add(n int) {
	now := time.Now()
	if now.UnixNano() >= s.until.Load() || int64(n) < s.bytes.Load() {
		s.bytes.Store(int64(n))
	}
	s.until.Store(now.Add(slowPause).UnixNano())
}

// encode encodes a text on this thread.
func (m *Model) encode(ids []uint32, text []byte, flags C.uint32_t, out *C.struct_sluice_tok_result) error {
	if len(text) > shortInput {
		if m.slow.has(len(text)) {
			return &Error{Verb: "encode", Code: CodeDeadline, Reason: "a text no longer than this one took longer than " + m.limit().String()}
		}
		defer func(begin time.Time) {
			if time.Since(begin) > m.limit() {
				m.slow.add(len(text))
			}
		}(time.Now())
	}
	code := C.sluice_tokenizer_encode(m.model, (*C.uint8_t)(unsafe.SliceData(text)), C.size_t(len(text)), flags,
		(*C.uint32_t)(unsafe.SliceData(ids)), C.size_t(len(ids)), out)
	return failure("encode", code, out)
}

// appendIDs appends the ids of an encoding, which are in ids if they fit there.
func appendIDs(dst, ids []uint32, out *C.struct_sluice_tok_result) []uint32 {
	n := int(out.len)
	if out.data != nil {
		return append(dst, unsafe.Slice((*uint32)(out.data), n)...)
	}
	return append(dst, ids[:n]...)
}

// failure turns a code and its text into an error and frees the text.
func failure(verb string, code C.int, out *C.struct_sluice_tok_result) error {
	if code == 0 {
		return nil
	}
	err := &Error{Verb: verb, Code: Code(code), Reason: string(text(out))}
	C.sluice_tokenizer_free(out)
	return err
}

// text returns a result's text, which belongs to the library.
func text(out *C.struct_sluice_tok_result) []byte {
	return unsafe.Slice((*byte)(out.data), int(out.len))
}
