package admission

// itemList is a list of requests of one tenant.
type itemList struct{ first, last *Item }

// insert puts a request behind after, or first if that is nil.
func (l *itemList) insert(it, after *Item) {
	it.prev = after
	if after == nil {
		it.next, l.first = l.first, it
	} else {
		it.next, after.next = after.next, it
	}
	if it.next == nil {
		l.last = it
	} else {
		it.next.prev = it
	}
}

// appendTo appends the requests of the list.
func (l *itemList) appendTo(all []*Item) []*Item {
	for it := l.first; it != nil; it = it.next {
		all = append(all, it)
	}
	return all
}

func (l *itemList) remove(it *Item) {
	if it.prev == nil {
		l.first = it.next
	} else {
		it.prev.next = it.next
	}
	if it.next == nil {
		l.last = it.prev
	} else {
		it.next.prev = it.prev
	}
	it.prev, it.next = nil, nil
}

// goesBefore is the order of a tenant's heap.
func (it *Item) goesBefore(o *Item) bool {
	return it.Due < o.Due || it.Due == o.Due && it.seq < o.seq
}

func (it *Item) place() *int { return &it.index }
