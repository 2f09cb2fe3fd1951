package jsonscan

// Op is what an Edit does to its member.
type Op uint8

// The operations of an Edit. A member that is null counts as present.
const (
	Set     Op = iota // replace the value if present, else append the member
	Replace           // replace the value if present
	Remove            // remove the member and its comma
)

// Edit changes one member. Value is raw JSON. An Edit of a nested member has no effect if its
// parent is absent, is not an object, or is edited in the same call. If a Key occurs several times
// in one call, the first counts.
type Edit struct {
	Key   Key
	Op    Op
	Value []byte
}

// Edited appends the body with the edits applied to dst. All other bytes are those of the body, in
// order. Members added by Set follow the last member, in the order of the edits. dst must not
// overlap the body. With up to 16 edits nothing but dst is allocated.
func (d *Doc) Edited(dst []byte, edits ...Edit) []byte {
	var buf [maxInlineEdits]splice
	pos := 0
	for _, sp := range d.plan(buf[:0], edits) {
		dst = append(dst, d.Body[pos:sp.start]...)
		dst = append(dst, sp.key...)
		dst = append(dst, sp.value...)
		pos = sp.end
	}
	return append(dst, d.Body[pos:]...)
}

// Segments appends to dst what Edited would write, as a list of slices for a vectored write.
// Nothing is copied: the slices belong to the body, the edits' values and constants, and must not
// be modified.
func (d *Doc) Segments(dst [][]byte, edits ...Edit) [][]byte {
	var buf [maxInlineEdits]splice
	pos := 0
	for _, sp := range d.plan(buf[:0], edits) {
		if sp.start > pos {
			dst = append(dst, d.Body[pos:sp.start])
		}
		if len(sp.key) > 0 {
			dst = append(dst, sp.key)
		}
		if len(sp.value) > 0 {
			dst = append(dst, sp.value)
		}
		pos = sp.end
	}
	if pos < len(d.Body) {
		dst = append(dst, d.Body[pos:])
	}
	return dst
}

const maxInlineEdits = 16

// splice replaces Body[start:end] by key and value.
type splice struct {
	start, end int
	key, value []byte
	at         Key
	remove     bool
}

// spliceKeys are the `,"name":` of every key. Without its first byte it is the form for the first
// member of an object.
var spliceKeys = func() (keys [NumKeys][]byte) {
	for k := range keys {
		keys[k] = []byte(members[k].splice)
	}
	return keys
}()

// plan converts edits to splices with ascending offsets that do not overlap.
func (d *Doc) plan(out []splice, edits []Edit) []splice {
	var seen [2]uint64 // by Key, as in Doc.present
	parentEdited := false
	for i := range edits {
		parentEdited = parentEdited || edits[i].Key == KeySamplingParams
	}
	kept, keptSampling := d.Members, d.samplingMembers
	for i := range edits {
		e := &edits[i]
		if e.Key >= NumKeys || seen[e.Key>>6]>>(e.Key&63)&1 != 0 {
			continue
		}
		seen[e.Key>>6] |= 1 << (e.Key & 63)
		if e.Key.nested() && (parentEdited || d.Values[KeySamplingParams].Kind != Object) {
			continue
		}
		v := &d.Values[e.Key]
		switch {
		case v.Kind == Absent && e.Op == Set:
			pos := d.tail(e.Key)
			out = insert(out, splice{start: pos, end: pos, key: spliceKeys[e.Key], value: e.Value, at: e.Key})
		case v.Kind == Absent:
		case e.Op == Remove:
			out = insert(out, splice{start: v.KeyStart, end: v.End, at: e.Key, remove: true})
			if e.Key.nested() {
				keptSampling--
			} else {
				kept--
			}
		default:
			out = insert(out, splice{start: v.Start, end: v.End, value: e.Value, at: e.Key})
		}
	}
	return d.fixCommas(out, kept, keptSampling)
}

// insert keeps out sorted by start. Equal starts keep their order.
func insert(out []splice, sp splice) []splice {
	out = append(out, sp)
	for i := len(out) - 1; i > 0 && out[i-1].start > out[i].start; i-- {
		out[i-1], out[i] = out[i], out[i-1]
	}
	return out
}

// tail returns the offset after the last member of the object that k belongs to.
func (d *Doc) tail(k Key) int {
	end := d.Close
	if k.nested() {
		end = d.Values[KeySamplingParams].End - 1
	}
	return beforeSpace(d.Body, end)
}

func beforeSpace(b []byte, i int) int {
	for i > 0 && (b[i-1] == ' ' || b[i-1] == '\n' || b[i-1] == '\r' || b[i-1] == '\t') {
		i--
	}
	return i
}

// fixCommas removes the comma before the first member added to an object that keeps none, and
// extends each run of removed neighbours by one comma: the one after it, or at the end of the
// object the one before it. Extending members one by one would count the same comma twice.
func (d *Doc) fixCommas(out []splice, kept, keptSampling int) []splice {
	b := d.Body
	for i := 0; i < len(out); i++ {
		sp := &out[i]
		if !sp.remove {
			if sp.key == nil {
				continue
			}
			n := &kept
			if sp.at.nested() {
				n = &keptSampling
			}
			if *n == 0 {
				sp.key = sp.key[1:]
			}
			*n++
			continue
		}
		first := i
		next, comma := afterComma(b, sp.end)
		for comma && i+1 < len(out) && out[i+1].remove && out[i+1].start == next {
			i++
			next, comma = afterComma(b, out[i].end)
		}
		// The first splice of the run removes all of it, the others nothing.
		start, end := out[first].start, out[i].end
		if comma {
			end = next
		} else if p := beforeSpace(b, start); p > 0 && b[p-1] == ',' {
			start = p - 1
		}
		out[first].start, out[first].end = start, end
		for j := first + 1; j <= i; j++ {
			out[j].start, out[j].end = end, end
		}
	}
	return out
}

// afterComma returns the offset of the member after the value that ends at i.
func afterComma(b []byte, i int) (int, bool) {
	if i = skipSpace(b, i); i < len(b) && b[i] == ',' {
		return skipSpace(b, i+1), true
	}
	return i, false
}
