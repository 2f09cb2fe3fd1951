package admin

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Runtime is what a running router tells the tools of the same user.
type Runtime struct {
	Address string    `json:"address"` // admin listener, HOST:PORT
	Token   string    `json:"token"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Version string    `json:"version,omitempty"`
	Config  string    `json:"config,omitempty"` // absolute path of the configuration file; "": none
}

// RuntimeDir returns the directory of runtime files: sluice-UID in $XDG_RUNTIME_DIR, or else in
// the temporary directory.
func RuntimeDir() string {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	return filepath.Join(base, "sluice-"+strconv.Itoa(os.Getuid()))
}

// DefaultRuntimeFile returns the path of the runtime file for a router with this admin address.
func DefaultRuntimeFile(address string) string {
	return filepath.Join(RuntimeDir(), strings.ReplaceAll(address, "/", "_")+".json")
}

// WriteRuntimeFile writes rt atomically, with mode 0600. It creates a missing directory with mode
// 0700. The default directory must belong to the user and be closed to others, because every user
// can write to the temporary directory.
func WriteRuntimeFile(path string, rt Runtime) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("admin: cannot create the folder of runtime file %q: %w; name another with admin.runtime_file", path, err)
	}
	if dir == RuntimeDir() {
		if err := checkOwner(dir, 0o077); err != nil {
			return err
		}
	}
	body, err := json.Marshal(rt)
	if err != nil {
		return fmt.Errorf("admin: cannot write runtime file %q: %w", path, err)
	}
	// CreateTemp creates the file with mode 0600 and a name that nobody could prepare.
	f, err := os.CreateTemp(dir, ".sluice-*")
	if err != nil {
		return fmt.Errorf("admin: cannot write runtime file %q: %w; name another with admin.runtime_file", path, err)
	}
	_, err = f.Write(append(body, '\n'))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("admin: cannot write runtime file %q: %w", path, err)
	}
	return nil
}

// checkOwner returns an error if path belongs to another user, is a symbolic link, or has one of
// the forbidden permission bits.
func checkOwner(path string, forbidden fs.FileMode) error {
	st, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("admin: cannot stat %q: %w", path, err)
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	if ok && int(sys.Uid) != os.Getuid() {
		return fmt.Errorf("admin: cannot trust %q: it belongs to user %d, not to %d", path, sys.Uid, os.Getuid())
	}
	if st.Mode()&forbidden != 0 || st.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("admin: cannot trust %q: mode %v; want it closed to others (chmod go-rwx)", path, st.Mode())
	}
	return nil
}

// ReadRuntimeFile reads a file of WriteRuntimeFile. It rejects a file that belongs to another user
// or is open to others, because its address could lead the token to an attacker.
func ReadRuntimeFile(path string) (Runtime, error) {
	var rt Runtime
	body, err := os.ReadFile(path)
	if err != nil {
		return rt, fmt.Errorf("admin: cannot read runtime file %q: %w", path, err)
	}
	if err := checkOwner(path, 0o077); err != nil {
		return rt, err
	}
	if err := json.Unmarshal(body, &rt); err != nil {
		return rt, fmt.Errorf("admin: cannot read runtime file %q: %w; remove it if no router runs", path, err)
	}
	if rt.Address == "" || rt.Token == "" {
		return rt, fmt.Errorf("admin: cannot use runtime file %q: address or token is missing", path)
	}
	return rt, nil
}

// ErrNoRouter is the error of Find if no router of this user runs.
var ErrNoRouter = errors.New("no router of this user runs with an admin listener")

// AmbiguousError is the error of Find if several routers match.
type AmbiguousError struct{ Found []Runtime }

// Error lists the routers, a line each.
func (e *AmbiguousError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "admin: cannot choose among %d running routers; name one of them:", len(e.Found))
	for i := range e.Found {
		rt := &e.Found[i]
		file := rt.Config
		if file == "" {
			file = "no configuration file"
		}
		fmt.Fprintf(&b, "\n  --admin %s  (%s, pid %d, up %v)", rt.Address, file, rt.PID, time.Since(rt.Started).Round(time.Second))
	}
	return b.String()
}

// Find returns the Runtime of the router with the admin address addr, or of the only running
// router if addr is "". An address without a host, or with another loopback host, matches by port.
// Find removes the files of processes that have ended.
func Find(addr string) (Runtime, error) {
	paths, err := filepath.Glob(filepath.Join(RuntimeDir(), "*.json"))
	if err != nil {
		return Runtime{}, fmt.Errorf("admin: cannot list %q: %w", RuntimeDir(), err)
	}
	var found []Runtime
	var last error
	for _, p := range paths {
		rt, err := ReadRuntimeFile(p)
		if err != nil {
			last = err
			continue
		}
		if !alive(rt.PID) {
			os.Remove(p)
			continue
		}
		if addr == "" || addr == rt.Address || samePort(addr, rt.Address) {
			found = append(found, rt)
		}
	}
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1:
		return Runtime{}, &AmbiguousError{Found: found}
	case last != nil:
		return Runtime{}, last
	case addr != "":
		return Runtime{}, fmt.Errorf("admin: cannot find a router with admin address %q: %w", addr, ErrNoRouter)
	}
	return Runtime{}, ErrNoRouter
}

func samePort(asked, address string) bool {
	host, port, err := net.SplitHostPort(asked)
	if err != nil || host != "" && !isLoopback(host) {
		return false
	}
	_, has, err := net.SplitHostPort(address)
	return err == nil && has == port
}

func alive(pid int) bool {
	if pid <= 0 {
		return false
	}
	err := syscall.Kill(pid, 0)
	return err == nil || errors.Is(err, syscall.EPERM)
}

// removeRuntimeFile removes the file if this process still owns it.
func removeRuntimeFile(path string) {
	if rt, err := ReadRuntimeFile(path); err == nil && rt.PID == os.Getpid() {
		os.Remove(path)
	}
}
