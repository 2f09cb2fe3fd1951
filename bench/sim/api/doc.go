// Package api is what clients of a simulated engine see: the request bodies of the
// generating endpoints of vLLM, SGLang and TensorRT-LLM, and the format of their
// responses, streamed or whole, and of their errors.
//
// A Body is a request as read, a Response is its response with one Choice for each
// output, and a Format writes it for one endpoint. A Choice generates its own tokens and
// text (package textgen); when it does so, and what its KV costs, is the scheduler's
// matter in package sim. The members of a response that report a KV transfer come
// through Transfer.
//
// The files whose names begin with sglang and trtllm are those engines'; the other
// formats are vLLM's, of which TensorRT-LLM uses two.
package api
