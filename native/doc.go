// Package native is the flat C under nixl: function-pointer tables filled by
// dlopen (libnixl_capi, libucp, the CUDA driver), the threads that own a NIXL agent
// or a UCP worker, and the watch over signal handlers. Beside pebbe/zmq4 it is the only package of the
// project that imports "C", and nothing on the path of a request or of a chunk
// calls into it. sluice_native.h is the surface; the same files are built and
// tested outside of Go by `make native-test`.
package native
