// Package networks checks whether an address from outside lies in the networks that an operator
// allows.
//
// OwnListeners recognizes the addresses of this process, which no worker may have.
//
// The main function is Contains. Packages that receive an address call it before they connect:
// registration (workers' addresses), fleet (addresses that engines report), sidechannel (handles),
// discovery/header (requests' headers), engineapi (addresses that callers pass to engines). The
// package resolves no name but those of this machine, and opens no connection.
package networks
