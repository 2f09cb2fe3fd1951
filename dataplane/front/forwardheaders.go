package front

import (
	"unsafe"

	"sluice/dataplane/ascii"
	"sluice/dataplane/headerrules"
	"sluice/dataplane/upstream"
)

// ForwardFields implements Exchange.
func (x *httpExchange) ForwardFields(dst []upstream.Field) []upstream.Field {
	typed := false
	for i := range x.head.Lines {
		l := &x.head.Lines[i]
		name := x.head.Name(l)
		if !headerrules.OfRequest(name).ReachesEngine(x.srv.initial.WithholdClientKeys) || x.head.IsOption(name) || x.overriddenHeader(unsafeString(name)) != nil {
			continue
		}
		typed = typed || ascii.EqualFold(name, "Content-Type")
		dst = append(dst, upstream.Field{Name: unsafeString(name), Value: unsafeString(x.head.Value(l))})
	}
	for i := range x.requestOverrides {
		if s := &x.requestOverrides[i]; !headerrules.OfRequest([]byte(s.name)).NeverForwarded() {
			dst = append(dst, upstream.Field{Name: s.name, Value: s.value})
		}
	}
	if !typed {
		dst = append(dst, upstream.Field{Name: "Content-Type", Value: "application/json"})
	}
	if x.ClientIP.IsValid() && len(x.srv.options().Proxies.Trusted) > 0 {
		x.forwardedFor = x.ClientIP.AppendTo(x.forwardedFor[:0])
		dst = append(dst, upstream.Field{Name: "X-Forwarded-For", Value: unsafeString(x.forwardedFor)})
	}
	return dst
}

// unsafeString returns a string that shares b's bytes, which must not change while it is used.
func unsafeString(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
