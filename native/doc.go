// Package native is the parent of the only packages of the project that import "C"
// (besides pebbe/zmq4, a dependency). It has no code of its own.
//
//	dl    loads shared libraries at run time and protects Go's signal handlers
//	rings the command and event rings that Go shares with a library's driver
//	nixl  libnixl_capi and the thread that owns a NIXL agent
//	ucx   libucp and a worker for active messages
//	cuda  the CUDA driver, for memory on a GPU
//	tokenizer  libsluice_tokenizer: chat templates and token ids
//
// There is one folder per dynamically loaded library; dl and rings are what they
// share. nixl imports ucx, because NIXL contains UCX, and cuda. No library is linked
// against: each folder fills a table of function pointers with dlopen. Nothing on the
// path of a request or of a stream's event calls into C, except tokenizer, which
// computes for at most one bounded call of a request, off the event loops.
//
// A folder's C code calls functions of the folders that its Go package imports, so
// that the Go linker links both. `make native-test` builds and tests the same C files
// outside Go. A build without cgo has the same Go API, which reports that it has no
// C code.
package native
