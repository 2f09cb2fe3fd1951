// Package liveness decides from evidence whether an engine is frozen: it neither answers nor closes
// its connections, so that only timeouts show it.
//
// The main type is Detector. It is pure: the fleet samples the evidence at an interval and acts on
// the verdict.
package liveness
