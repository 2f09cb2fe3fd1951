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

// Rank is one rank to be written.
type Rank struct {
	Meta
	Slot worker.Slot
	// there says whether the rank still has its slot; nil: it has. A snapshot takes its
	// time, and by the end of it the slot may be another rank's.
	stillValid func() bool
}

// Stats is what a snapshot holds.
type Stats struct {
	Ranks, Blocks int
	Bytes         int64
	Duration      time.Duration
}

// writer writes one snapshot beside its place.
type writer struct {
	file         *os.File
	out          *bufio.Writer
	sum          *xxh3.Hasher // of all that was written
	enc          *zstd.Encoder
	rate         int64 // bytes a second before compression; 0: as fast as it goes
	began        time.Time
	uncompressed int64
	sectionBuf   []byte
	stats        Stats
}

// write writes the ranks and what is pending of an older snapshot to path: to a
// temporary file first, which replaces the old one when all of it is on disk. So
// a router that dies meanwhile leaves the old snapshot.
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
	// Only what is whole takes the old one's place.
	if err = errors.Join(w.out.Flush(), f.Sync(), f.Close()); err != nil {
		return s, err
	}
	if err = os.Rename(f.Name(), path); err != nil {
		return s, err
	}
	if dir, err := os.Open(filepath.Dir(path)); err == nil {
		dir.Sync() // so that the new name outlives a power cut; not every file system can
		dir.Close()
	}
	w.stats.Duration = time.Since(w.began)
	return w.stats, nil
}

// checkWritable makes the folder of a snapshot where need be and says whether a file can be
// made in it, so that it is told at the start and not an interval later.
func checkWritable(path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("snapshot: cannot make the folder of %q: %w", path, err)
	}
	f, err := os.CreateTemp(dir, temporaryPattern(path))
	if err != nil {
		return fmt.Errorf("snapshot: cannot write beside %q: %w", path, err)
	}
	return errors.Join(f.Close(), os.Remove(f.Name()))
}

// temporaryPattern is the pattern of the names of what is being written.
func temporaryPattern(path string) string { return "." + filepath.Base(path) + "-*" }

// abandonedAge is how long nothing is written to a temporary file before it is taken for
// that of a router that was killed. One that is written changes many times a second.
const abandonedAge = 10 * time.Minute

// removeAbandoned removes what routers that were killed left beside a snapshot, so that those
// that are killed again and again do not fill the disk.
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

// checkpoint is a place to come back to.
type checkpoint struct {
	sum   xxh3.Hasher
	stats Stats
}

func (w *writer) checkpoint() checkpoint { return checkpoint{*w.sum, w.stats} }

// rollBack takes back what was written since a mark.
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

// throttle holds the rate, so that a snapshot takes no more than its share of a core
// and of the disk.
func (w *writer) throttle(n int) {
	if w.uncompressed += int64(n); w.rate > 0 {
		time.Sleep(time.Until(w.began.Add(time.Duration(float64(w.uncompressed) / float64(w.rate) * float64(time.Second)))))
	}
}

// copyFrom writes bytes of another snapshot as they are.
func (w *writer) copyFrom(r io.Reader, n int64) error {
	_, err := io.CopyN(io.MultiWriter(w.out, w.sum), r, n)
	w.stats.Bytes += n
	return err
}
