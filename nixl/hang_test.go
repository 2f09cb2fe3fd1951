package nixl

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"sluice/native/dl"
)

func TestFakeHangIsAnError(t *testing.T) {
	w := fakeNetwork()
	a, err := w.fake.Open(t.Context(), Config{Name: "a", CallTimeout: 50 * time.Millisecond, Commands: 16})
	if err != nil {
		t.Fatal(err)
	}
	b := w.open(t, Config{Name: "b"})
	p := connectAgents(t, a, b)
	m := hostMemory(t, a, 4096)
	w.fake.Hang("a")
	for _, problem := range checkHanging(a, p, m) {
		t.Error(problem)
	}
}

// checkHanging answers what does not hold of an agent whose library does not come
// back from a notification; it closes the agent.
func checkHanging(a *Agent, p *Peer, m *Memory) (problems []string) {
	check := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Sprintf(format, args...))
		}
	}
	ctx, began := context.Background(), time.Now()
	err := a.Notify(ctx, p, []byte("x"))
	var e *Error
	check(errors.Is(err, ErrHung) && errors.As(err, &e) && strings.Contains(e.Hint, "send a notification"), "notify: %v; want ErrHung that names the call", err)
	_, err = a.Metadata(ctx)
	check(errors.Is(err, ErrHung), "metadata: %v; want ErrHung", err)
	n := 0
	for ; n < 100 && !errors.Is(err, ErrFull); n++ {
		err = a.Post(p, []byte("x"))
	}
	check(errors.Is(err, ErrFull), "after %d posts: %v; want ErrFull", n, err)
	short, cancel := context.WithTimeout(ctx, 5*time.Millisecond)
	defer cancel()
	_, err = a.Metadata(short)
	check(errors.Is(err, ErrFull), "with a full ring: %v; want ErrFull", err)
	err = a.Health()
	check(errors.Is(err, ErrHung), "health: %v; want ErrHung", err)
	err = a.Close()
	check(errors.Is(err, ErrHung) || errors.Is(err, ErrFull), "close: %v; want ErrHung or ErrFull", err)
	check(m.Free() != nil, "memory that the library may still use was freed")
	check(time.Since(began) < 5*time.Second, "all of it took %s", time.Since(began))
	return problems
}

// fakeLibrary compiles the C tests' libnixl_capi, fakeUCX their libucp.
func fakeLibrary(t *testing.T) string { return compiled(t, "libnixl_capi.so", "fake_nixl_capi.c") }

func fakeUCX(t *testing.T) string { return compiled(t, "libucp.so.0", "fake_ucp.c") }

func compiled(t *testing.T, name, source string) string {
	t.Helper()
	if dl.ABI() == 0 {
		t.Skip("built without cgo")
	}
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	out := filepath.Join(t.TempDir(), name)
	cmd := exec.Command(cc, "-shared", "-fPIC", "-std=gnu11", "-I../native", "-o", out, "../native/testdata/"+source)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, b)
	}
	return out
}

// TestThreadHangIsAnError drives the real thread into a library that hangs, in a
// process of its own: the thread is left behind there.
func TestThreadHangIsAnError(t *testing.T) {
	c := startChild(t, "hang", LibraryVariable+"="+fakeLibrary(t), "FAKE_NIXL_HANG=gen_notif")
	if l := c.line(t); l != "ok" {
		t.Error(l)
	}
}

func childHang() {
	ctx := context.Background()
	say := func(err error) { fmt.Println(strings.ReplaceAll(err.Error(), "\n", " ")); os.Exit(0) }
	a, err := Open(ctx, Config{Name: "a", CallTimeout: 100 * time.Millisecond, Commands: 16})
	if err != nil {
		say(err)
	}
	md, err := a.Metadata(ctx)
	if err != nil {
		say(err)
	}
	p, err := a.LoadPeer(ctx, md, "")
	if err != nil {
		say(err)
	}
	m, err := NewHostMemory(4096)
	if err == nil {
		err = a.Register(ctx, m)
	}
	if err != nil {
		say(err)
	}
	if problems := checkHanging(a, p, m); len(problems) > 0 {
		fmt.Println(strings.Join(problems, "; "))
		return
	}
	fmt.Println("ok")
}
