package nixl

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"hash/crc32"
	"os"
	"testing"
	"time"

	"sluice/native/cuda"
)

// requireCUDA returns a CUDA device, and skips the test if there is none.
func requireCUDA(t *testing.T) int {
	t.Helper()
	n, err := cuda.Devices()
	if err != nil {
		t.Skipf("no GPU here: %v", err)
	}
	if n == 0 {
		t.Skip("no GPU here: the CUDA driver sees none")
	}
	v, err := cuda.Open(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("CUDA driver %d.%d, %d devices", v/1000, v%1000/10, n)
	return 0
}

// vramBytes is the memory of each side in the tests with two processes.
const vramBytes = 64 << 20

// childVRAM registers memory of the GPU, tells its address and metadata, and for each
// notification the checksum of what the memory holds then.
func childVRAM(version string) {
	check := func(err error) {
		if err != nil {
			fmt.Println("error", err)
			os.Exit(3)
		}
	}
	m, err := NewDeviceMemory(0, vramBytes)
	check(err)
	a := childOpen(version, func(n Notification) {
		b := make([]byte, vramBytes)
		if err := m.Read(0, b); err != nil {
			fmt.Println("error", err)
			return
		}
		fmt.Printf("%s %08x\n", n.Message, crc32.ChecksumIEEE(b))
	})
	check(a.Register(context.Background(), m))
	md, err := a.Metadata(context.Background())
	check(err)
	fmt.Printf("vram %d %s\n", m.Remote(0, vramBytes).Address, base64.StdEncoding.EncodeToString(md))
	os.Stdin.Read(make([]byte, 1))
}

// TestRealCUDAPeer moves 64 MiB between memory of the GPU of two processes, as engines on
// one node do, and between host memory and that of the other process. The receiver's
// notification says what it holds: it must not arrive before the bytes.
func TestRealCUDAPeer(t *testing.T) {
	device := requireCUDA(t)
	a := realNetwork().open(t, Config{Telemetry: true})
	c := startChild(t, "vram:1.5.1")
	var address uint64
	var md string
	if _, err := fmt.Sscanf(c.line(t), "vram %d %s", &address, &md); err != nil {
		t.Fatal(err)
	}
	metadata, err := base64.StdEncoding.DecodeString(md)
	if err != nil {
		t.Fatal(err)
	}
	vram := must[*Memory](t)(NewDeviceMemory(device, vramBytes))
	if err := a.Register(t.Context(), vram); err != nil {
		t.Fatal(err)
	}
	host := hostMemory(t, a, vramBytes)
	p := must[*Peer](t)(a.LoadPeer(t.Context(), metadata, "NIXL 1.5.1"))
	remote := []Remote{{Kind: VRAM, Address: address, Bytes: vramBytes, Device: uint64(device)}}
	content := make([]byte, vramBytes)
	for round := range 4 { // the first of each sets up the connection
		for name, from := range map[string]*Memory{"GPU": vram, "host": host} {
			for i := range content {
				content[i] = byte(i>>12) + byte(round)*7 + byte(len(name))
			}
			if err := from.Write(0, content); err != nil {
				t.Fatal(err)
			}
			tr := must[*Transfer](t)(a.Start(t.Context(), Write, []Span{{from, 0, vramBytes}}, p, remote, []byte(name)))
			tel := must[Telemetry](t)(tr.Wait(t.Context()))
			if got, want := c.line(t), fmt.Sprintf("%s %08x", name, crc32.ChecksumIEEE(content)); got != want {
				t.Errorf("the other process has %q when notified, want %q", got, want)
			}
			t.Logf("%s -> GPU of the other process: 64 MiB in %s by NIXL, %s seen: %.1f GB/s", name, tel.Duration, tel.Observed, vramBytes/tel.Observed.Seconds()/1e9)
		}
		for name, to := range map[string]*Memory{"GPU": vram, "host": host} {
			if err := to.Write(0, make([]byte, vramBytes)); err != nil { // nothing of what must be read
				t.Fatal(err)
			}
			tr := must[*Transfer](t)(a.Start(t.Context(), Read, []Span{{to, 0, vramBytes}}, p, remote, nil))
			tel := must[Telemetry](t)(tr.Wait(t.Context()))
			back := make([]byte, vramBytes)
			if err := to.Read(0, back); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(back, content) {
				t.Errorf("what was read into the %s's memory is not what the other process has", name)
			}
			t.Logf("GPU of the other process -> %s: 64 MiB in %s by NIXL, %s seen: %.1f GB/s", name, tel.Duration, tel.Observed, vramBytes/tel.Observed.Seconds()/1e9)
		}
	}
}

func TestCUDAMemory(t *testing.T) {
	m := must[*Memory](t)(NewDeviceMemory(requireCUDA(t), 1<<20))
	want := bytes.Repeat([]byte("vram"), 1<<18)
	if err := m.Write(0, want); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(want))
	if err := m.Read(0, got); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Error("what was read from VRAM is not what was written")
	}
	if m.Read(1, got) == nil || m.Write(-1, got) == nil {
		t.Error("reads and writes beyond the end were accepted")
	}
	if err := m.Free(); err != nil {
		t.Error(err)
	}
}

// TestRealCUDATransfers moves 64 MiB between host memory of one agent and VRAM of
// another, both ways, with a notification, and a record from VRAM onto a board.
func TestRealCUDATransfers(t *testing.T) {
	device := requireCUDA(t)
	w := realNetwork()
	arrived := make(chan time.Time, 16)
	a := w.open(t, Config{Telemetry: true})
	b := w.open(t, Config{OnNotification: func(Notification) { arrived <- time.Now() }})
	const size = 64 << 20
	host := hostMemory(t, a, size)
	vram := must[*Memory](t)(NewDeviceMemory(device, size))
	began := time.Now()
	if err := b.Register(t.Context(), vram); err != nil {
		t.Fatal(err)
	}
	t.Logf("64 MiB of VRAM registered in %s", time.Since(began))
	p := connectAgents(t, a, b)
	want := bytes.Repeat([]byte("0123456789abcdef"), size/16)
	if err := host.Write(0, want); err != nil {
		t.Fatal(err)
	}
	for _, op := range []Op{Write, Read} {
		for range 3 { // the first sets up the connection
			began := time.Now()
			tr := must[*Transfer](t)(a.Start(t.Context(), op, []Span{{host, 0, size}}, p, []Remote{vram.Remote(0, size)}, []byte("moved")))
			tel := must[Telemetry](t)(tr.Wait(t.Context()))
			seen := (<-arrived).Sub(began)
			t.Logf("%s host <-> VRAM: 64 MiB in %s by NIXL, %s seen, notification after %s: %.1f GB/s", op, tel.Duration, tel.Observed, seen, size/tel.Observed.Seconds()/1e9)
		}
		got := make([]byte, size)
		if err := vram.Read(0, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Fatalf("after the %s VRAM holds something else", op)
		}
		clear(host.Bytes()) // what the read must bring back
	}
	if !bytes.Equal(host.Bytes()[:16], make([]byte, 16)) {
		t.Fatal("the host's memory was not cleared")
	}
	tr := must[*Transfer](t)(a.Start(t.Context(), Read, []Span{{host, 0, size}}, p, []Remote{vram.Remote(0, size)}, nil))
	must[Telemetry](t)(tr.Wait(t.Context()))
	if !bytes.Equal(host.Bytes(), want) {
		t.Error("what was read from VRAM is not what was written")
	}

	landed := make(chan Completion, 1)
	board := must[*CompletionBoard](t)(NewCompletionBoard(t.Context(), a, 64, func(_ CompletionSlot, c Completion) { landed <- c }))
	q := connectAgents(t, b, a)
	k, _ := board.Acquire(5, time.Now().Add(time.Minute))
	rec := k.Record(Completion{Request: 5, Bytes: size})
	if err := vram.Write(0, rec[:]); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	tr = must[*Transfer](t)(b.Start(t.Context(), Write, []Span{{vram, 0, recordBytes}}, q, []Remote{board.Remote(k)}, nil))
	must[Telemetry](t)(tr.Wait(t.Context()))
	select {
	case c := <-landed:
		t.Logf("record written from VRAM, reported %s after the start: %+v", time.Since(began), c)
	case <-time.After(5 * time.Second):
		t.Error("the record from VRAM did not land")
	}
}
