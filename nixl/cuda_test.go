package nixl

import (
	"bytes"
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
