// Package fdlimit reserves a few of the process's file descriptors for its operation: the
// admin listener, health probes, a hot restart.
//
// The kernel assigns the lowest free number, so a descriptor with a number near the limit
// means that nearly all lower ones are in use. IsReserved reports this; packages that open
// connections (front, upstream) close such a connection again.
//
// GrowTable enlarges the kernel's descriptor table once at start.
//
// The package never closes a descriptor and knows nothing of connections.
package fdlimit
