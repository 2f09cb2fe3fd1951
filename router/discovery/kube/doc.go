// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is its one type; cmd runs it under package discovery when kube.selector
// is set. It lists and watches pods through client-go's REST client and
// reflector, with the typed objects of the core API, and changes nothing in the
// cluster: get, list and watch of pods is all it needs.
//
// What client-go costs everyone who links it, measured on a program that does
// nothing else (linux/amd64, v0.37): with kubernetes/typed/core/v1, whose scheme
// knows every API group, 15 MB of resident memory (2.6 MB of them its own, the
// rest pages of the binary that its start-up touches); with the REST client and a
// scheme of the core group alone, as here, 6 MB (0.8 MB). A binary built with
// -tags nokube has none of it.
package kube
