package front

import (
	"unsafe"

	"sluice/dataplane/upstream"
)

// ForwardFields appends the client's header lines that an engine may see, names as the
// client wrote them: all but those of headerTable and those that Connection names. What a
// Handler has said (Say) stands in the place of the client's lines of that name. A missing
// Content-Type becomes application/json, and behind trusted proxies X-Forwarded-For is
// ClientIP. Strings are valid until return.
func (x *Exchange) ForwardFields(dst []upstream.Field) []upstream.Field {
	if x.party != nil {
		return x.detachedFields(dst)
	}
	typed := false
	for i := range x.head.lines {
		l := &x.head.lines[i]
		name := x.head.nameOf(l)
		if !classOf(name).reachesEngine(x.srv.opt.OwnKeys) || x.head.isOption(name) || x.said(borrow(name)) != nil {
			continue
		}
		typed = typed || equalFold(name, "Content-Type")
		dst = append(dst, upstream.Field{Name: borrow(name), Value: borrow(x.head.valueOf(l))})
	}
	for i := range x.says {
		if s := &x.says[i]; !withheld(classOf([]byte(s.name))) {
			dst = append(dst, upstream.Field{Name: s.name, Value: s.value})
		}
	}
	if !typed {
		dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	}
	if x.ip.IsValid() && len(x.srv.live().Proxies.Trusted) > 0 {
		x.ipText = x.ip.AppendTo(x.ipText[:0])
		dst = append(dst, upstream.Field{Name: "X-Forwarded-For", Value: borrow(x.ipText)})
	}
	return dst
}

// borrow makes a string of b without a copy; it lives as long as b's bytes.
func borrow(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

// withheld says whether engines never see lines of this class, not even the router's own
// or those of a detached exchange's maker.
func withheld(c headerClass) bool {
	return c == headerConnection || c == headerRouter || c == headerSteering
}
