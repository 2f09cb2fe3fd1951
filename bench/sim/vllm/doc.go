// Package vllm describes what differs on the wire between releases of vLLM.
//
// ParseRelease reads a version; the methods of a Release name the differences, so that
// code of the simulated engine asks for a behaviour and not for a version number. Its
// caller is package sim.
package vllm
