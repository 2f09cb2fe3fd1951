//go:build !race && !invariants

package kvindex

const invariants = false
