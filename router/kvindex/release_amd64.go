//go:build amd64 && !race

package kvindex

// release stores a word that readers may be looking at, so that whoever sees what is
// stored after it sees it too. Here any store does that: the processor keeps stores
// in order, words do not tear, and the compiler moves no store past an atomic
// one. Go's own atomic store would do more, and empty the processor's store buffer
// each time, which costs as much as all else about a block.
func release(p *uint64, v uint64) { *p = v }

func release32(p *uint32, v uint32) { *p = v }
