// Package kube finds workers among the pods of a Kubernetes cluster, by label.
//
// Source is its one type; cmd runs it under package discovery when kube.selector
// is set. It lists and watches pods through client-go's typed client and reflector,
// with the objects of the core API, and changes nothing in the cluster: get, list and
// watch of pods is all it needs.
//
// The typed client is the generic one (client-go's gentype) that
// kubernetes/typed/core/v1 makes its pods' client of, over a scheme of the core group
// alone, and not that package itself: its scheme knows every API group, and Go links
// one binary, so that a sidecar pays for it too, which never runs this package.
// Resident memory of an idle sidecar and size of its binary, measured in one go
// (linux/amd64, client-go v0.37): 47.5 MB and 51 MB with kubernetes/typed/core/v1, 33.2
// and 37 as here, 31.8 and 33 with the bare REST client. A sidecar is to stay within
// 40 MB. -tags nokube leaves client-go out.
package kube
