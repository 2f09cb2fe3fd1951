//go:build !linux

package kvindex

// mapped is nothing here: all tables are on the heap. See mapped_linux.go.
type mapped struct{ given int }

var mapFrom, giveBack = 1 << 14, 1 << 14

func newCells(size int) ([]sideCell, *mapped) { return make([]sideCell, size), nil }

func (m *mapped) free()               {}
func (m *mapped) populate()           {}
func (m *mapped) fill(begun, n int)   {}
func (m *mapped) leave(begun, at int) {}
