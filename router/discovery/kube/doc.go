// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is its one type; cmd runs it under package discovery when kube.selector
// is set. It lists and watches pods through client-go's typed core client
// (kubernetes/typed/core/v1) and a reflector, and changes nothing in the cluster: list and
// watch of pods is all it needs. Whatever fails it reports to its discovery.Set, in words
// that hold no secret, and goes on trying; client-go's own log is off.
//
// The typed core client brings the types of every API group, through its scheme: 28 MB of
// binary, half of them beside what list and watch alone need. So it stands in a build of
// its own, sluice-kube, and no sidecar has it (cmd/sluice/kubebuild.go).
package kube
