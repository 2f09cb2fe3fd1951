// Package fieldrules says which members of a request's body a client may not write, because an engine
// reads them as an address, a file, an argument of a loader or the name of a request (enginefields.go).
//
// Check looks at a body at every depth in one pass (fieldscan.go). The front and the engine API apply
// the same table. The package knows no endpoints and no errors of the API: a Refusal names the member
// and says what is wrong with it.
package fieldrules
