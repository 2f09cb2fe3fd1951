//go:build !cgo || !linux

package native

import (
	"errors"
	"unsafe"
)

var errNoNative = errors.New("native: this binary was built without cgo")

// ABI is 0: this build has no C surface.
func ABI() int { return 0 }

// Resident is always false in a build without the C surface.
func Resident(string) bool { return false }

// Load always refuses in a build without the C surface.
func Load(string) (LoadCode, string) { return LoadNoNative, errNoNative.Error() }

// LoadUCX always refuses in a build without the C surface.
func LoadUCX(string) (LoadCode, string) { return LoadNoNative, errNoNative.Error() }

// UCXEnvironment does nothing in a build without the C surface.
func UCXEnvironment() {}

// RestoreSignals does nothing in a build without the C surface.
func RestoreSignals() uint64 { return 0 }

// Environment knows no C environment in this build.
func Environment(string) (string, bool) { return "", false }

// UCXVersion knows no UCX in this build.
func UCXVersion(string) (major, minor, patch int, ok bool) { return 0, 0, 0, false }

// StartAgent always refuses in a build without the C surface.
func StartAgent(unsafe.Pointer, uint32, uint32, uint32, int, int, Pace) error { return errNoNative }

// UCX does nothing in a build without the C surface.
type UCX struct{}

// NewUCX always refuses in a build without the C surface.
func NewUCX(unsafe.Pointer, uint32, uint32, uint32, int) (UCX, bool) { return UCX{}, false }

// Step has nothing to do in a build without the C surface.
func (UCX) Step() UCXNext { return UCXStopped }

// FD is -1 in a build without the C surface.
func (UCX) FD() int { return -1 }

// Give always refuses in a build without the C surface.
func Give([]byte) uint64 { return 0 }

// Take has nothing to take in a build without the C surface.
func Take(uint64, int) []byte { return nil }

// Layout is empty in a build without the C surface.
func Layout() map[string]uintptr { return nil }

// CudaDevices is 0 in a build without the C surface.
func CudaDevices() (int, error) { return 0, errNoNative }

// CudaOpen always refuses in a build without the C surface.
func CudaOpen(int) (int, error) { return 0, errNoNative }

// CudaAlloc always refuses in a build without the C surface.
func CudaAlloc(int, int) (uint64, error) { return 0, errNoNative }

// CudaFree always refuses in a build without the C surface.
func CudaFree(int, uint64) error { return errNoNative }

// CudaWrite always refuses in a build without the C surface.
func CudaWrite(int, uint64, []byte) error { return errNoNative }

// CudaRead always refuses in a build without the C surface.
func CudaRead(int, []byte, uint64) error { return errNoNative }
