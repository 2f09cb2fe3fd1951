//go:build !linux

package kvindex

// mmapCells is empty on this platform: all tables are on the heap. See mmap_linux.go.
type mmapCells struct{ returned int }

var mmapMinCells, mmapReturnBytes = 1 << 14, 1 << 14

func newCells(size int) ([]engineCell, *mmapCells) { return make([]engineCell, size), nil }

func (m *mmapCells) free()                     {}
func (m *mmapCells) populate()                 {}
func (m *mmapCells) fill(begun, n int)         {}
func (m *mmapCells) returnPages(begun, at int) {}
