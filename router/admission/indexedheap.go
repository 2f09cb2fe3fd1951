package admission

// element is what a heap orders. It stores its own place, so that it can be removed from the middle.
type element[E any] interface {
	comparable
	goesBefore(E) bool
	place() *int // where the heap writes the element's index
}

// indexedHeap is a binary heap, the element that goes before all others at index 0. Unlike container/heap
// it tells its elements their places and converts none to an interface.
type indexedHeap[E element[E]] []E

// push adds an element.
func (h *indexedHeap[E]) push(e E) {
	*e.place() = len(*h)
	*h = append(*h, e)
	h.up(*e.place())
}

// remove takes an element of the heap out.
func (h *indexedHeap[E]) remove(e E) {
	i, last := *e.place(), len(*h)-1
	h.swap(i, last)
	var none E
	(*h)[last] = none
	if *h = (*h)[:last]; i != last {
		h.fix((*h)[i])
	}
}

// fix moves an element whose order has changed.
func (h *indexedHeap[E]) fix(e E) {
	if i := *e.place(); !h.down(i) {
		h.up(i)
	}
}

func (h *indexedHeap[E]) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !(*h)[i].goesBefore((*h)[parent]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

func (h *indexedHeap[E]) down(i int) (moved bool) {
	a := *h
	for {
		child := 2*i + 1
		if child >= len(a) {
			return moved
		}
		if right := child + 1; right < len(a) && a[right].goesBefore(a[child]) {
			child = right
		}
		if !a[child].goesBefore(a[i]) {
			return moved
		}
		h.swap(i, child)
		i, moved = child, true
	}
}

func (h *indexedHeap[E]) swap(i, j int) {
	a := *h
	a[i], a[j] = a[j], a[i]
	*a[i].place(), *a[j].place() = i, j
}
