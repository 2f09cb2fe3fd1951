// Package native is the flat C under nixl: function-pointer tables filled by
// dlopen. Beside pebbe/zmq4 it is the only package of the project that imports
// "C", and nothing on the path of a request or of a chunk calls into it.
package native
