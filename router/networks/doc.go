// Package networks says whether an address that somebody names lies where an operator
// lets it lie.
//
// Its main function is Allow. Whoever takes an address from outside calls it before
// anything is connected to there: registration (workers' addresses), fleet (what
// engines tell of themselves), sidechannel (handles), discovery/header (requests'
// headers), routed (what callers hand to engines). It resolves no name and opens no connection.
package networks
