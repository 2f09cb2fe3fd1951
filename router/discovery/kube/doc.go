// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is its one type; cmd runs it under package discovery when kube.selector
// is set. It lists and watches pods through client-go's REST client and
// reflector, with the typed objects of the core API, and changes nothing in the
// cluster: get, list and watch of pods is all it needs.
//
// Why not client-go's typed client (kubernetes/typed/core/v1), whose calls would be
// shorter: its scheme knows every API group, and Go links one binary, so that a
// sidecar pays for it too, which never runs this package. Measured on a sidecar
// after 2 s of load (linux/amd64, client-go v0.37): resident memory 42.7 MB and a
// binary of 49 MB with the typed client; 27.8 MB and 31 MB with the REST client and a
// scheme of the core group alone, as here; 24.4 MB and 21 MB without client-go, as
// -tags nokube builds it. A sidecar is to stay within 40 MB.
package kube
