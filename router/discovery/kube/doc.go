// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is the main type; router/app runs it as a discovery.Source if kube.selector is set. It
// lists and watches pods over net/http and needs only the permissions to do that; it changes nothing in
// the cluster. It reports every failure to its discovery.Set, without secrets, and tries again.
//
// The official client is not used: it links the types of every API group, 28 MB of binary of which 14 to
// 22 MiB become resident in each sidecar, for two calls of one resource.
package kube
