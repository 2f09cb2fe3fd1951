package harness

import (
	"bytes"
	"sync"
)

// SyncBuffer is a buffer that many goroutines may write to, for logs.
type SyncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

// Write appends p; it never fails.
func (s *SyncBuffer) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

// String returns a copy of all that was written.
func (s *SyncBuffer) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

// Tail returns the last n bytes, or all if there are fewer.
func (s *SyncBuffer) Tail(n int) string {
	all := s.String()
	if len(all) > n {
		all = all[len(all)-n:]
	}
	return all
}
