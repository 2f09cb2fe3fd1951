// Package tokenizer renders chat templates and encodes text to a model's token ids,
// with a library that it opens at run time.
//
// Open loads libsluice_tokenizer, which this folder builds with cargo (src/) and whose
// ABI sluice_tokenizer.h documents; Library.Load reads a model's folder; Model.Render
// and Model.Encode do the work. A binary without the library, or built without cgo, has
// the same API, and Open says why there is none.
//
// Calls compute, so no event loop may make them. At most as many run at once as Go has
// processors, each on a goroutine of its own. A call that has run longer than
// Options.Timeout is abandoned: its caller gets an error at once, and it keeps its place
// among those that run until it ends.
package tokenizer
