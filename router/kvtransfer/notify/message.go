package notify

import "github.com/tinylib/msgp/msgp"

// maxID bounds a request id; LMCache takes any string.
const maxID = 512

// kind says what a frame is.
type kind uint8

const (
	malformed kind = iota
	foreign        // a message of LMCache's that is no notification
	ready          // KV-ready of one rank
)

// parse reads one frame: a msgpack map {"type": "ProxyNotif", "req_id": str}
// since LMCache 0.3.7, type "NixlProxyNotif" from 0.3.3 to 0.3.6. Further
// members are passed over. The id borrows from frame.
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
	return nil, foreign
}
