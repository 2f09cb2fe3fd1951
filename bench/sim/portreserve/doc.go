// Package portreserve keeps a TCP port for an engine while the engine is down.
//
// Reserve binds an address without listening, so the kernel refuses connections to it
// and no other process can bind it; Listen listens on a reserved address. Its caller is
// package sim, whose engines stop and start at one address.
package portreserve
