package snapshot

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// File is a snapshot that was read and found valid. It keeps the file open, so that ranks can
// be restored after a newer snapshot has taken the file's name. In memory it keeps only the
// location of each rank's sections. Its methods may be called from any goroutine.
type File struct {
	path     string
	mu       sync.Mutex
	file     *os.File
	ids      []worker.ID // in the file's order
	sections map[worker.ID]rankSections
}

// rankSections locates the sections of a rank.
type rankSections struct {
	meta     Meta
	from, to int64
}

// Open reads and checks a complete snapshot. Its error names the file and the cause; for a
// missing file it wraps fs.ErrNotExist.
func Open(path string) (*File, error) {
	info, err := os.Stat(path)
	if err == nil && !info.Mode().IsRegular() { // opening a pipe would block forever
		err = fmt.Errorf("%w: it is not a regular file", ErrFormat)
	}
	if err != nil {
		return nil, fmt.Errorf("snapshot: cannot read %q: %w", path, err)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("snapshot: cannot read %q: %w", path, err)
	}
	s := &File{path: path, file: f, sections: make(map[worker.ID]rankSections)}
	if err := s.check(); err != nil {
		f.Close()
		return nil, fmt.Errorf("snapshot: cannot read %q: %w", path, err)
	}
	return s, nil
}

func (s *File) check() error {
	in := bufio.NewReaderSize(s.file, 1<<20)
	sum := xxh3.New()
	head := make([]byte, headerSize)
	n, err := io.ReadFull(in, head)
	if err != nil && err != io.EOF && err != io.ErrUnexpectedEOF {
		return err
	}
	if err := checkHeader(head[:n]); err != nil {
		return err
	}
	sum.Write(head)
	at := int64(headerSize)
	var open *rankSections
	closePart := func() {
		if open != nil {
			open.to = at
			id := worker.ID{Worker: open.meta.Worker, Rank: open.meta.Rank}
			s.ids = append(s.ids, id)
			s.sections[id] = *open
		}
	}
	var body []byte
	for {
		if _, err := io.ReadFull(in, head); err == io.EOF || err == io.ErrUnexpectedEOF {
			return fmt.Errorf("%w: it has %d bytes and no end", ErrTruncated, at)
		} else if err != nil {
			return err
		}
		kind, size, want, err := readSectionHead(head)
		if err != nil {
			return fmt.Errorf("%w, at byte %d", err, at)
		}
		if body, err = readBody(in, body, size); err != nil {
			return fmt.Errorf("%w: a section of %d bytes at byte %d ends too early", err, size, at)
		}
		if xxh3.Hash(body) != want {
			return fmt.Errorf("%w: the checksum of the section at byte %d is wrong", ErrCorrupted, at)
		}
		switch kind {
		case endSection:
			if len(body) != 8 || binary.LittleEndian.Uint64(body) != sum.Sum64() {
				return fmt.Errorf("%w: the checksum of the file is wrong", ErrCorrupted)
			}
			if _, err := in.ReadByte(); err != io.EOF {
				return fmt.Errorf("%w: there are bytes after its end", ErrCorrupted)
			}
			closePart()
			return nil
		case rankSection:
			closePart()
			m, err := readMeta(body)
			if err != nil {
				return err
			}
			open = &rankSections{meta: m, from: at}
		case chainsSection:
			if open == nil {
				return fmt.Errorf("%w: the blocks at byte %d belong to no rank", ErrCorrupted, at)
			}
		}
		sum.Write(head)
		sum.Write(body)
		at += int64(sectionHead + size)
	}
}

// readBody grows its buffer as bytes arrive, because a corrupt head may claim any length.
func readBody(in io.Reader, buf []byte, size int) ([]byte, error) {
	buf = buf[:0]
	for size > 0 {
		n := min(size, 1<<20)
		at := len(buf)
		buf = append(buf, make([]byte, n)...)
		if _, err := io.ReadFull(in, buf[at:]); err == io.EOF || err == io.ErrUnexpectedEOF {
			return buf, ErrTruncated
		} else if err != nil {
			return buf, err
		}
		size -= n
	}
	return buf, nil
}

// Ranks returns the ranks not yet restored or discarded.
func (s *File) Ranks() []worker.ID {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]worker.ID(nil), s.ids...)
}

// extract removes a rank from the File and returns its sections. It succeeds once per rank.
func (s *File) extract(id worker.ID) (p rankSections, ok bool) {
	p, ok = s.sections[id]
	delete(s.sections, id)
	for i := range s.ids {
		if s.ids[i] == id {
			s.ids = append(s.ids[:i], s.ids[i+1:]...)
			break
		}
	}
	return p, ok
}

// Restore puts the blocks of a rank into the index, which must not hold any of it, and returns
// the rank's Meta. It succeeds once per rank: ok is false the second time, for an unknown rank
// and for a rank whose model has changed.
func (s *File) Restore(id worker.ID, slot worker.Slot, model string, index kvindex.Importer) (m Meta, blocks int, ok bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, ok := s.extract(id)
	if !ok || s.file == nil || p.meta.Model != model {
		return m, 0, false, nil
	}
	if r, can := index.(kvindex.Reserver); can {
		r.Reserve(slot, p.meta.Blocks)
	}
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(maxUncompressed))
	if err != nil {
		return m, 0, false, err
	}
	defer dec.Close()
	in := io.NewSectionReader(s.file, p.from, p.to-p.from)
	head := make([]byte, sectionHead)
	var body, plain []byte
	var x kvindex.Exported
	for {
		if _, err := io.ReadFull(in, head); err == io.EOF {
			return p.meta, blocks, true, nil
		} else if err != nil {
			return m, blocks, false, fmt.Errorf("snapshot: cannot read %q: %w", s.path, err)
		}
		kind, size, want, err := readSectionHead(head)
		if err == nil {
			body, err = readBody(in, body, size)
		}
		if err == nil && xxh3.Hash(body) != want {
			err = fmt.Errorf("%w since it was checked", ErrCorrupted)
		}
		if err == nil && kind == chainsSection {
			plain, err = dec.DecodeAll(body, plain[:0])
		}
		for rest := plain; err == nil && kind == chainsSection && len(rest) > 0; {
			if rest, err = readChain(rest, &x); err == nil {
				blocks += index.Import(slot, &x).Added
			}
		}
		if err != nil {
			return m, blocks, false, fmt.Errorf("snapshot: cannot read %q: %w", s.path, err)
		}
	}
}

// copyRemaining copies the ranks not yet restored to the next snapshot unchanged.
func (s *File) copyRemaining(w *writer, written map[worker.ID]bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	for _, id := range s.ids {
		if written[id] {
			continue
		}
		p := s.sections[id]
		if err := w.copyFrom(io.NewSectionReader(s.file, p.from, p.to-p.from), p.to-p.from); err != nil {
			return err
		}
		w.stats.Ranks++
		w.stats.Blocks += p.meta.Blocks
	}
	return nil
}

// Close closes the file; ranks not yet restored are lost.
func (s *File) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file == nil {
		return nil
	}
	f := s.file
	s.file, s.ids = nil, nil
	clear(s.sections)
	return errors.Join(f.Close())
}
