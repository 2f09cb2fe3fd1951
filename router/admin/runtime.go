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
	Address string    `json:"address"` // of the admin listener, HOST:PORT
	Token   string    `json:"token"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	Version string    `json:"version,omitempty"`
}

// RuntimeDir is the folder of runtime files: sluice-UID in $XDG_RUNTIME_DIR, or
// in the temporary folder.
func RuntimeDir() string {
	base := os.Getenv("XDG_RUNTIME_DIR")
	if base == "" {
		base = os.TempDir()
	}
	return filepath.Join(base, "sluice-"+strconv.Itoa(os.Getuid()))
}

// DefaultRuntimeFile is the runtime file of a router whose admin listener has
// this address.
func DefaultRuntimeFile(address string) string {
	return filepath.Join(RuntimeDir(), strings.ReplaceAll(address, "/", "_")+".json")
}

// WriteRuntimeFile writes rt with mode 0600, whole or not at all. A folder that
// it has to make gets mode 0700; one in the default place must be the user's
// own and closed to others, for the temporary folder is open to all.
func WriteRuntimeFile(path string, rt Runtime) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("admin: cannot make the folder of runtime file %q: %w; name another with admin.runtime_file", path, err)
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
	// CreateTemp gives mode 0600 and a name nobody could have prepared.
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

// checkOwner refuses what another user owns or may reach; forbidden are the
// permission bits that must not be set.
func checkOwner(path string, forbidden fs.FileMode) error {
	st, err := os.Lstat(path)
	if err != nil {
		return fmt.Errorf("admin: cannot look at %q: %w", path, err)
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

// ReadRuntimeFile reads what WriteRuntimeFile wrote. It refuses a file that is
// another user's or open to others: its address could be a trap for the token.
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

// ErrNoRouter is returned by Find when no router of this user runs.
var ErrNoRouter = errors.New("no router of this user runs with an admin listener")

// Find gives the runtime of the router whose admin address is addr, or with ""
// of the only one that runs. An address without a host, or with another name of
// this machine, finds the router by its port. Files of processes that have
// ended are removed.
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
		var addrs []string
		for _, rt := range found {
			addrs = append(addrs, rt.Address)
		}
		return Runtime{}, fmt.Errorf("admin: cannot choose among %d running routers: name one with --admin %s", len(found), strings.Join(addrs, " or --admin "))
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

// removeRuntimeFile removes the file if it is still this process's.
func removeRuntimeFile(path string) {
	if rt, err := ReadRuntimeFile(path); err == nil && rt.PID == os.Getpid() {
		os.Remove(path)
	}
}
