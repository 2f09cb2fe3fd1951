//go:build amd64 && !race

package kvindex

// release stores a word that readers may load concurrently. A reader that sees a later store sees
// this one too. On amd64 any store has this property: the processor keeps stores in order, aligned
// words do not tear, and the compiler does not move a store past an atomic one. An atomic store
// would also drain the processor's store buffer, which costs as much as the rest of the work for a
// block.
func release(p *uint64, v uint64) { *p = v }

func release32(p *uint32, v uint32) { *p = v }
