// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is the main type; router/app runs it as a discovery.Source if kube.selector is set. It
// lists and watches pods with client-go's typed core client (kubernetes/typed/core/v1) and a
// reflector. It needs only the permissions to list and watch pods, and changes nothing in the
// cluster. It reports every failure to its discovery.Set, without secrets, and tries again;
// client-go's own log is off.
//
// The typed core client links the types of every API group, through its scheme: 28 MB of binary,
// half of which list and watch alone do not need. It therefore has a separate build, sluice-kube,
// which no sidecar contains (cmd/sluice/kubebuild.go).
package kube
