package notify

import "github.com/tinylib/msgp/msgp"

// maxID is the maximum length of a request id; LMCache itself accepts any string.
const maxID = 512

// kind classifies a frame.
type kind uint8

const (
	malformed kind = iota
	otherType      // an LMCache message that is not a notification
	ready          // one rank's KV is ready
)

// parse parses one frame, a msgpack map {"type": "ProxyNotif", "req_id": str} since LMCache
// 0.3.7, with type "NixlProxyNotif" in 0.3.3 to 0.3.6. It skips other members. The id borrows
// from frame.
func parse(frame []byte) (id []byte, what kind) {
	n, b, err := msgp.ReadMapHeaderBytes(frame)
	if err != nil {
		return nil, malformed
	}
	var tag []byte
	for range n {
		var key []byte
		if key, b, err = msgp.ReadStringZC(b); err != nil {
			return nil, malformed
		}
		switch string(key) {
		case "type":
			tag, b, err = msgp.ReadStringZC(b)
		case "req_id":
			id, b, err = msgp.ReadStringZC(b)
		default:
			b, err = msgp.Skip(b)
		}
		if err != nil {
			return nil, malformed
		}
	}
	switch string(tag) {
	case "ProxyNotif", "NixlProxyNotif":
		if len(id) == 0 || len(id) > maxID {
			return nil, malformed
		}
		return id, ready
	case "":
		return nil, malformed
	}
	return nil, otherType
}
