package jsonscan

// Iter walks the elements of an array or the members of an object, without
// allocating. It is meant for values that a scan has accepted: on anything else
// it ends early, and never fails louder. The zero Iter has no elements.
//
//	for it := jsonscan.Walk(raw); it.Next(); {
//		use(it.Raw())
//	}
type Iter struct {
	// Value is the position of the current element in the walked bytes. KeyStart is only valid in
	// an object.
	Value Value

	s      scanner
	pos    int // start of the next element
	end    int // once there is no next element: the closing bracket or brace, or a mistake
	keyEnd int
	object bool
}

// Walk returns an Iter before the first element of raw, which it borrows.
func Walk(raw []byte) Iter {
	it := Iter{pos: -1}
	i := skipSpace(raw, 0)
	if i < len(raw) && (raw[i] == '[' || raw[i] == '{') {
		it.s = scanner{b: raw, maxDepth: hardDepth}
		it.object = raw[i] == '{'
		it.pos = i + 1
	}
	return it
}

// Next moves to the next element and returns whether there is one.
func (it *Iter) Next() bool {
	i := it.start()
	if i < 0 {
		return false
	}
	end, kind := it.s.value(i, 1)
	return it.setValue(i, end, kind)
}

// NextMembers moves to the next element like Next. In the same walk it finds several members of an
// element that is an object, as Members does; positions are those in the walked bytes. Another
// element has no members.
func (it *Iter) NextMembers(vals []Value, names ...string) bool {
	clear(vals)
	i := it.start()
	if i < 0 {
		return false
	}
	b := it.s.b
	if i >= len(b) || b[i] != '{' {
		end, kind := it.s.value(i, 1)
		return it.setValue(i, end, kind)
	}
	members := Iter{pos: i + 1, s: scanner{b: b, maxDepth: hardDepth}, object: true}
	members.find(vals, names)
	if members.end >= len(b) || b[members.end] != '}' {
		return it.setValue(i, -1, Absent)
	}
	return it.setValue(i, members.end+1, Object)
}

// start moves to the next element and returns where its value begins, -1 if there is none.
func (it *Iter) start() int {
	if it.pos < 0 {
		return -1
	}
	b := it.s.b
	i := skipSpace(b, it.pos)
	it.pos, it.end = -1, i
	it.Value = Value{}
	if i >= len(b) || b[i] == ']' || b[i] == '}' {
		return -1
	}
	if it.object {
		it.Value.KeyStart = i
		if b[i] != '"' {
			return -1
		}
		if it.keyEnd = it.s.str(i); it.keyEnd < 0 {
			return -1
		}
		if i = skipSpace(b, it.keyEnd); i >= len(b) || b[i] != ':' {
			return -1
		}
		i = skipSpace(b, i+1)
	}
	return i
}

// setValue makes b[start:end] the current element; end is negative if it is not a value.
func (it *Iter) setValue(start, end int, kind Kind) bool {
	if end < 0 {
		return false
	}
	it.Value.Start, it.Value.End, it.Value.Kind = start, end, kind
	b := it.s.b
	if it.end = skipSpace(b, end); it.end < len(b) && b[it.end] == ',' {
		it.pos = it.end + 1
	}
	return true
}

// Raw returns the bytes of the current element, borrowed from the walked value.
func (it *Iter) Raw() []byte { return it.s.b[it.Value.Start:it.Value.End] }

// IsKey reports whether the current member of an object is called name, however its key is escaped.
func (it *Iter) IsKey(name string) bool {
	if !it.object || it.Value.Kind == Absent {
		return false
	}
	var buf [maxNameLen]byte
	return string(unescapedName(it.s.b[it.Value.KeyStart+1:it.keyEnd-1], buf[:0], len(name))) == name
}

// Members finds several members of an object in one walk. vals[i] becomes the position of the
// member names[i], Absent if there is none, the last one if there are several. A value that is not
// an object has no members.
func Members(object []byte, vals []Value, names ...string) {
	clear(vals)
	if it := Walk(object); it.object {
		it.find(vals, names)
	}
}

// find is Members for the members that follow.
func (it *Iter) find(vals []Value, names []string) {
	longest := 0
	for _, name := range names {
		longest = max(longest, len(name))
	}
	for it.Next() {
		var buf [maxNameLen]byte
		name := unescapedName(it.s.b[it.Value.KeyStart+1:it.keyEnd-1], buf[:0], longest)
		for i := range names {
			if string(name) == names[i] {
				vals[i] = it.Value
			}
		}
	}
}

// Key appends the unescaped name of the current member of an object; nothing in an array.
func (it *Iter) Key(dst []byte) []byte {
	if !it.object || it.Value.Kind == Absent {
		return dst
	}
	return appendUnescaped(dst, it.s.b[it.Value.KeyStart+1:it.keyEnd-1])
}
