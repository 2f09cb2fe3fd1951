// Package redact hides the private members of engines' answers from clients: the members of a KV
// hand-over, and error texts that repeat them.
//
// Redactor blanks them in a body or an event stream as its bytes pass, InPlace in a whole body.
// Rewriter and Append remove them from events and texts. Packages relay, router/pd and
// router/engineapi call it. The names are in remove.go (members) and errortext.go (parts of handles in
// texts).
package redact
