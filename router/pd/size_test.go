package pd

import (
	"testing"
	"unsafe"
)

// TestStreamSize checks the size of streamState. Thousands exist at a time, and a few bytes more
// would move each into the next size class.
func TestStreamSize(t *testing.T) {
	if size := unsafe.Sizeof(streamState{}); size > 288 {
		t.Errorf("a stream has %d bytes; a size class ends at 288", size)
	}
	if size := unsafe.Sizeof(streamMigration{}); size > 256 {
		t.Errorf("a stream that may move has %d bytes; a size class ends at 256", size)
	}
}
