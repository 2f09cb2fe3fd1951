// Package tokenizer renders chat templates and encodes text to a model's token ids,
// with a library that it opens at run time.
//
// Open loads libsluice_tokenizer, which this folder builds with cargo (src/) and whose
// ABI sluice_tokenizer.h documents; Library.Load reads a model's folder; Model.Render
// and Model.Encode do the work, and Model.Prompt both in one call. A binary without the
// library, or built without cgo, has the same API, and Open says why there is none.
//
// Calls compute, so no event loop may make them. A call with at most 64 KiB runs on its
// caller's thread, a longer one on a thread of the library's own; of each, at most one for
// each of Go's processors runs at once, and eight in all. A long call that takes more than
// LoadOptions.Timeout, with its wait for a thread, is abandoned: its caller gets an error
// at once, and the thread is busy until the call ends. The bounds of its input and of a
// template's steps ensure that every call ends.
//
// What tests the library's own code (src/):
//
//   - go test compares texts with golden files; scripts/tokenizer_golden.py compares them and
//     ids with the programs that define them.
//   - FuzzRender, FuzzEncode, FuzzVocabularyFile and FuzzRanks call the ABI of the library in
//     use with templates, requests, texts, model files and vocabularies.
//   - scripts/tokenizer_check.sh runs tests/abi.rs with the address sanitizer, debug assertions
//     and overflow checks in this crate. Of its dependencies, which are compiled without
//     them, the sanitizer checks what they allocate and free.
package tokenizer
