// Package bootstrap is the server of a prefill node at which decode engines ask for the
// ranks of the prefill: SGLang's, or that of vLLM's Mooncake connector. It is a registry
// with two HTTP interfaces and knows no engine.
package bootstrap
