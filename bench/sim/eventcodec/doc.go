// Package eventcodec encodes KV cache events in every format that released engines
// have published.
//
// An Encoding is one of those formats (Encodings lists their names); an Encoder writes
// the batches of one publisher as msgpack. Sources of the formats are kv_events.py of
// vLLM and of SGLang. Its caller is package sim, which publishes the batches over ZMQ.
// It never decodes: the router's decoder is in router/kvevents.
package eventcodec
