package wire

import (
	"fmt"
	"net"
)

// frameReader splits the bytes of a connection into frames, at the client. Its buffer grows for a
// large one.
type frameReader struct {
	nc        net.Conn
	onReceive func() // called when bytes have come
	buf       []byte
	from, to  int
}

// next waits for the next frame. A payload over maxPayload bytes is an error before it is read.
// payload is valid until the next call.
func (r *frameReader) next(maxPayload int) (h header, payload []byte, err error) {
	for {
		h, ok := readHeader(r.buf[r.from:r.to])
		need := headerSize
		if ok {
			if h.size > maxPayload {
				return h, nil, &Error{CodeTooLarge, fmt.Sprintf("%s has %d bytes; want at most %d", h.kind, h.size, maxPayload)}
			}
			if need += h.size; r.to-r.from >= need {
				payload = r.buf[r.from+headerSize : r.from+need]
				r.from += need
				return h, payload, nil
			}
		}
		if r.from > 0 && r.from+need > len(r.buf) || r.from == r.to {
			r.to = copy(r.buf, r.buf[r.from:r.to])
			r.from = 0
		}
		if need > len(r.buf) {
			r.buf = append(r.buf[:r.to:r.to], make([]byte, need-r.to)...)
		}
		n, err := r.nc.Read(r.buf[r.to:])
		r.to += n
		if n > 0 {
			r.onReceive()
		} else if err != nil {
			return header{}, nil, err
		}
	}
}
