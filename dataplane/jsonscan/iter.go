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
	if it.pos < 0 {
		return false
	}
	b := it.s.b
	i := skipSpace(b, it.pos)
	it.pos = -1
	it.Value = Value{}
	if i >= len(b) || b[i] == ']' || b[i] == '}' {
		return false
	}
	if it.object {
		it.Value.KeyStart = i
		if b[i] != '"' {
			return false
		}
		if it.keyEnd = it.s.str(i); it.keyEnd < 0 {
			return false
		}
		if i = skipSpace(b, it.keyEnd); i >= len(b) || b[i] != ':' {
			return false
		}
		i = skipSpace(b, i+1)
	}
	end, kind := it.s.value(i, 1)
	if end < 0 {
		return false
	}
	it.Value.Start, it.Value.End, it.Value.Kind = i, end, kind
	if i = skipSpace(b, end); i < len(b) && b[i] == ',' {
		it.pos = i + 1
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
	it := Walk(object)
	if !it.object {
		return
	}
	longest := 0
	for _, name := range names {
		longest = max(longest, len(name))
	}
	for it.Next() {
		var buf [maxNameLen]byte
		name := unescapedName(object[it.Value.KeyStart+1:it.keyEnd-1], buf[:0], longest)
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
