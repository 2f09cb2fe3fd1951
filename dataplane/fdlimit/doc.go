// Package descriptors keeps a few of the process's file descriptors free for those who
// look after it: the admin listener, probes of its health, a restart. The kernel gives
// out the lowest number that is free, so a connection whose number is near the limit
// says that nearly all below are taken: Short tells those who make connections to give
// it up again. dataplane/front and dataplane/upstream ask; nobody else needs to.
//
// GrowTable, which a program calls at its start, makes the kernel's table of them large.
//
// It closes nothing itself and knows of no connection.
package fdlimit
