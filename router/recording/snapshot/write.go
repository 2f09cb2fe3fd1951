package snapshot

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/zeebo/xxh3"

	"sluice/router/kvindex"
	"sluice/router/worker"
)

// Rank is one rank to write.
type Rank struct {
	Meta
	Slot worker.Slot
	// stillValid returns whether the rank still has its slot; nil: it has. Writing a snapshot
	// takes time, and another rank may have the slot by the end.
	stillValid func() bool
}

// Stats describes the contents of a snapshot.
type Stats struct {
	Ranks, Blocks int
	Bytes         int64
	Duration      time.Duration
}

// writer writes one snapshot to a temporary file.
type writer struct {
	file         *os.File
	out          *bufio.Writer
	sum          *xxh3.Hasher // of all bytes written
	enc          *zstd.Encoder
	rate         int64 // bytes per second before compression; 0: unlimited
	began        time.Time
	uncompressed int64
	sectionBuf   []byte
	stats        Stats
}

// write writes the ranks, and the pending ones of an older snapshot, to path. It writes a
// temporary file first and renames it when everything is on disk. A router that dies meanwhile
// leaves the old snapshot intact.
func write(path string, rate int64, index kvindex.Exporter, ranks []Rank, old *File) (s Stats, err error) {
	f, err := os.CreateTemp(filepath.Dir(path), temporaryPattern(path)) // mode 0600
	if err != nil {
		return s, fmt.Errorf("snapshot: cannot write %q: %w", path, err)
	}
	defer func() {
		if err != nil {
			f.Close()
			os.Remove(f.Name())
			err = fmt.Errorf("snapshot: cannot write %q: %w", path, err)
		}
	}()
	w := &writer{file: f, out: bufio.NewWriterSize(f, 1<<20), sum: xxh3.New(), rate: rate, began: time.Now()}
	if w.enc, err = zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(1<<20)); err != nil {
		return s, err
	}
	defer w.enc.Close()
	if err = w.write(fileHeader()); err != nil {
		return s, err
	}
	written := make(map[worker.ID]bool)
	for i := range ranks {
		before := w.checkpoint()
		if err = w.rank(index, &ranks[i]); err != nil {
			return s, err
		}
		if there := ranks[i].stillValid; there != nil && !there() {
			if err = w.rollBack(before); err != nil {
				return s, err
			}
			continue
		}
		written[worker.ID{Worker: ranks[i].Worker, Rank: ranks[i].Rank}] = true
	}
	if old != nil {
		if err = old.copyRemaining(w, written); err != nil {
			return s, err
		}
	}
	if err = w.write(section(nil, endSection, binary.LittleEndian.AppendUint64(nil, w.sum.Sum64()))); err != nil {
		return s, err
	}
	// Only a complete file replaces the old one.
	if err = errors.Join(w.out.Flush(), f.Sync(), f.Close()); err != nil {
		return s, err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return s, err
	}
	if dir, err := os.Open(filepath.Dir(path)); err == nil {
		dir.Sync() // makes the new name survive a power failure; not every file system supports it
		dir.Close()
	}
	w.stats.Duration = time.Since(w.began)
	return w.stats, nil
}

// checkWritable creates the directory of a snapshot if necessary and checks that a file can be
// created in it. The error is then reported at the start, not an interval later.
func checkWritable(path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("snapshot: cannot create the directory of %q: %w", path, err)
	}
	f, err := os.CreateTemp(dir, temporaryPattern(path))
	if err != nil {
		return fmt.Errorf("snapshot: cannot create a file in the directory of %q: %w", path, err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// temporaryPattern returns the name pattern of temporary files.
func temporaryPattern(path string) string { return "." + filepath.Base(path) + "-*" }

// abandonedAge is the age since its last write at which a temporary file is assumed to belong
// to a router that was killed. A file that is being written changes many times a second.
const abandonedAge = 10 * time.Minute

// removeAbandoned removes the temporary files of killed routers, so that a router that is
// killed repeatedly does not fill the disk.
func removeAbandoned(path string) {
	dir := filepath.Dir(path)
	entries, err := os.ReadDir(dir)
	if err != nil {
		return
	}
	for _, e := range entries {
		if like, _ := filepath.Match(temporaryPattern(path), e.Name()); !like || !e.Type().IsRegular() {
			continue
		}
		if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > abandonedAge {
			os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

func (w *writer) write(b []byte) error {
	w.sum.Write(b)
	w.stats.Bytes += int64(len(b))
	_, err := w.out.Write(b)
	return err
}

// checkpoint is a position in the file to which rollBack can return.
type checkpoint struct {
	sum   xxh3.Hasher
	stats Stats
}

func (w *writer) checkpoint() checkpoint { return checkpoint{*w.sum, w.stats} }

// rollBack discards everything written since a checkpoint.
func (w *writer) rollBack(to checkpoint) error {
	if err := w.out.Flush(); err != nil {
		return err
	}
	*w.sum, w.stats = to.sum, to.stats
	if err := w.file.Truncate(to.stats.Bytes); err != nil {
		return err
	}
	_, err := w.file.Seek(to.stats.Bytes, io.SeekStart)
	return err
}

func (w *writer) rank(index kvindex.Exporter, r *Rank) (err error) {
	if err := w.write(appendMeta(nil, &r.Meta)); err != nil {
		return err
	}
	w.stats.Ranks++
	chains := w.sectionBuf[:0]
	flush := func() {
		if len(chains) > 0 && err == nil {
			err = w.write(appendChains(nil, w.enc, chains))
			w.throttle(len(chains))
		}
		chains = chains[:0]
	}
	index.Export(r.Slot, func(x *kvindex.Exported) bool {
		chains = appendChain(chains, x)
		w.stats.Blocks += len(x.Engine)
		if len(chains) >= sectionBytes {
			flush()
		}
		return err == nil
	})
	flush()
	w.sectionBuf = chains
	return err
}

// throttle keeps to the configured rate, which limits the snapshot's share of a core and of the
// disk.
func (w *writer) throttle(n int) {
	if w.uncompressed += int64(n); w.rate > 0 {
		time.Sleep(time.Until(w.began.Add(time.Duration(float64(w.uncompressed) / float64(w.rate) * float64(time.Second)))))
	}
}

// copyFrom copies bytes of another snapshot unchanged.
func (w *writer) copyFrom(r io.Reader, n int64) error {
	_, err := io.CopyN(io.MultiWriter(w.out, w.sum), r, n)
	w.stats.Bytes += n
	return err
}
