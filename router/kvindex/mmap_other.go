//go:build !linux

package kvindex

// mmapCells is nothing here: all tables are on the heap. See mapped_linux.go.
type mmapCells struct{ returned int }

var mmapMinCells, mmapReturnBytes = 1 << 14, 1 << 14

func newCells(size int) ([]engineCell, *mmapCells) { return make([]engineCell, size), nil }

func (m *mmapCells) free()                     {}
func (m *mmapCells) populate()                 {}
func (m *mmapCells) fill(begun, n int)         {}
func (m *mmapCells) returnPages(begun, at int) {}
