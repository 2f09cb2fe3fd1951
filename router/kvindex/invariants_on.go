//go:build race || invariants

package kvindex

// invariants: writers check the whole of a small index now and then.
const invariants = true
