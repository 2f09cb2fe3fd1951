package accesslog

import (
	"os"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"
)

// lookInterval is how often a rotatedFile looks whether its file is still there.
const lookInterval = time.Second

// rotatedFile is a rotated file that others may move or remove, as logrotate does: then it is opened again
// under its name. Its methods are called by one goroutine.
type rotatedFile struct {
	lumberjack.Logger
	open   os.FileInfo // what the last writes have gone to; nil: to be opened
	looked time.Time
}

// Write implements io.Writer.
func (f *rotatedFile) Write(b []byte) (int, error) {
	if now := time.Now(); now.Sub(f.looked) >= lookInterval {
		f.looked = now
		if info, err := os.Stat(f.Filename); f.open != nil && (err != nil || !os.SameFile(info, f.open)) {
			f.open = nil
			if err := f.Logger.Close(); err != nil { // the next write opens it
				return 0, err
			}
		}
	}
	if f.open == nil {
		if err := createLog(f.Filename); err != nil {
			return 0, err
		}
	}
	n, err := f.Logger.Write(b)
	if f.open == nil && err == nil {
		if info, failed := os.Stat(f.Filename); failed == nil {
			f.open = info
		}
	}
	return n, err
}

// createLog creates a log that is not there, readable for its group as log shippers expect; lumberjack would
// create it for its owner alone, and move away a directory of its name.
func createLog(path string) error {
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o640)
	if err != nil {
		return err
	}
	return f.Close()
}
