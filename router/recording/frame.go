package recording

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"
)

// A recording is a header followed by frames. The header is magic, the version as 16 bits
// little-endian, and six zero bytes. A frame is
//
//	kind     1 byte: frameData, frameStart or frameEnd
//	zeros    3 bytes
//	length   4 bytes, little-endian, of the body
//	checksum 8 bytes, little-endian: XXH3-64 of the body
//	body     one zstd frame of entries
//
// A start frame begins with all definitions to which the entries after it refer, so that a file
// may begin with any start frame. The first frame of a file is a start frame. The end frame has
// an empty body; a file without it was cut short.
const (
	magic           = "SLUICREC"
	version         = 3 // since 2: InitialBlocks, InitialSkipped; since 3: RecordingInfo
	headerSize      = 16
	frameHeadSize   = 16
	maxFrame        = 64 << 20 // compressed
	maxUncompressed = 256 << 20
)

type frameKind byte

const (
	frameData frameKind = iota + 1
	frameStart
	frameEnd
)

// Errors of a Reader, wrapped with the file's name and the cause.
var (
	ErrFormat    = errors.New("this is not a recording of sluice")
	ErrVersion   = errors.New("its version is not supported")
	ErrTruncated = errors.New("it is truncated")
	ErrCorrupted = errors.New("it is corrupt")
	// ErrUnfinished means that every frame is valid but the end frame is missing: the file is
	// still being written, or its router was killed.
	ErrUnfinished = errors.New("it has no end: it is still being written, or its router was killed")
)

func fileHeader() []byte {
	h := append(make([]byte, 0, headerSize), magic...)
	h = binary.LittleEndian.AppendUint16(h, version)
	return h[:headerSize]
}

func checkHeader(h []byte) error {
	if len(h) < len(magic) || string(h[:len(magic)]) != magic {
		return fmt.Errorf("%w: it does not begin with %q", ErrFormat, magic)
	}
	if len(h) < headerSize {
		return fmt.Errorf("%w: it has %d bytes; the header alone has %d", ErrTruncated, len(h), headerSize)
	}
	if v := binary.LittleEndian.Uint16(h[len(magic):]); v < 1 || v > version {
		return fmt.Errorf("%w: it has version %d, this sluice reads 1 to %d; use a newer sluice", ErrVersion, v, version)
	}
	return nil
}

// appendFrame appends a complete frame that contains the compressed entries.
func appendFrame(dst []byte, kind frameKind, enc *zstd.Encoder, entries []byte) []byte {
	at := len(dst)
	dst = append(dst, make([]byte, frameHeadSize)...)
	if kind != frameEnd {
		dst = enc.EncodeAll(entries, dst)
	}
	head, body := dst[at:at+frameHeadSize], dst[at+frameHeadSize:]
	head[0] = byte(kind)
	binary.LittleEndian.PutUint32(head[4:], uint32(len(body)))
	binary.LittleEndian.PutUint64(head[8:], xxh3.Hash(body))
	return dst
}

// Copy copies the frames of r, a recording without its header, to sink until r ends. It checks
// each frame.
func Copy(sink Sink, r io.Reader) error {
	var frame []byte
	for {
		var kind frameKind
		var err error
		if kind, frame, err = readFrame(r, frame); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("recording: cannot read the stream: %w", err)
		}
		if err := sink.Frame(kind == frameStart, frame); err != nil {
			return err
		}
	}
}

// readFrame reads one frame including its head and reuses buf. At the end of r it returns
// io.EOF.
func readFrame(r io.Reader, buf []byte) (kind frameKind, frame []byte, err error) {
	frame = append(buf[:0], make([]byte, frameHeadSize)...)
	switch n, err := io.ReadFull(r, frame); {
	case err == io.EOF:
		return 0, nil, io.EOF
	case err == io.ErrUnexpectedEOF:
		return 0, nil, fmt.Errorf("%w: it ends within the header of a frame, after %d of %d bytes", ErrTruncated, n, frameHeadSize)
	case err != nil:
		return 0, nil, err
	}
	kind = frameKind(frame[0])
	size := binary.LittleEndian.Uint32(frame[4:])
	if kind < frameData || kind > frameEnd || frame[1]|frame[2]|frame[3] != 0 || size > maxFrame {
		return 0, nil, fmt.Errorf("%w: the header of a frame is invalid", ErrCorrupted)
	}
	sum := binary.LittleEndian.Uint64(frame[8:])
	// The buffer grows as bytes arrive, because a corrupt head may claim any length.
	for left := int(size); left > 0; {
		n := min(left, 1<<20)
		at := len(frame)
		frame = append(frame, make([]byte, n)...)
		if got, err := io.ReadFull(r, frame[at:]); err != nil {
			if err == io.EOF || err == io.ErrUnexpectedEOF {
				return 0, nil, fmt.Errorf("%w: a frame of %d bytes ends after %d", ErrTruncated, size, int(size)-left+got)
			}
			return 0, nil, err
		}
		left -= n
	}
	if xxh3.Hash(frame[frameHeadSize:]) != sum {
		return 0, nil, fmt.Errorf("%w: the checksum of a frame is wrong", ErrCorrupted)
	}
	return kind, frame, nil
}
