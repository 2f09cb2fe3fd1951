//go:build cgo

package notify

import (
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"
)

// senderVariable makes this test binary a sender of reports, to the endpoint it holds.
const senderVariable = "SLUICE_NOTIFY_TEST_SENDER"

func TestMain(m *testing.M) {
	if to := os.Getenv(senderVariable); to != "" {
		sendReports(to, 3000)
		return
	}
	os.Exit(m.Run())
}

// timed opens what is sent here, as "SLUICE1" does the connector's lines.
const timed = "SLUICE1 "

// sendReports sends count messages, one a millisecond, each the time it was sent.
func sendReports(to string, count int) {
	s, err := zmq.NewSocket(zmq.PUSH)
	if err == nil {
		err = s.Connect(to)
	}
	if err != nil {
		println(err.Error())
		os.Exit(1)
	}
	for next := time.Now().Add(100 * time.Millisecond); count > 0; count-- {
		time.Sleep(time.Until(next))
		next = next.Add(time.Millisecond)
		if _, err := s.SendBytes(strconv.AppendInt([]byte(timed), time.Now().UnixNano(), 10), 0); err != nil {
			println(err.Error())
			os.Exit(1)
		}
	}
	s.Close()
	zmq.Term() // waits until all are out
}

// BenchmarkReportOverZMQ: from the send in another process to the handler in Go, one
// a millisecond; CPU of this process.
func BenchmarkReportOverZMQ(b *testing.B) {
	for b.Loop() {
		times := make(chan time.Duration, 4096)
		board, err := Listen(Options{Endpoint: "tcp://127.0.0.1:*", Report: func(m []byte) bool {
			sent, err := strconv.ParseInt(strings.TrimPrefix(string(m), timed), 10, 64)
			if err == nil {
				times <- time.Duration(time.Now().UnixNano() - sent)
			}
			return err == nil
		}})
		if err != nil {
			b.Fatal(err)
		}
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), senderVariable+"="+board.Endpoint())
		cpu, began := cpuTime(), time.Now()
		if out, err := cmd.CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		b.ReportMetric(100*float64(cpuTime()-cpu)/float64(time.Since(began)), "%cpu")
		var all []time.Duration
		for end := time.After(5 * time.Second); len(all) < 3000; {
			select {
			case d := <-times:
				all = append(all, d)
			case <-end:
				b.Fatalf("%d of 3000 came", len(all))
			}
		}
		slices.Sort(all)
		b.ReportMetric(float64(all[1500].Nanoseconds())/1e3, "p50-µs")
		b.ReportMetric(float64(all[2970].Nanoseconds())/1e3, "p99-µs")
		b.ReportMetric(0, "ns/op")
		board.Close()
	}
}

// A socket at rest takes next to nothing.
func TestIdle(t *testing.T) {
	if testing.Short() {
		t.Skip("a second of rest")
	}
	listen(t, Options{})
	time.Sleep(100 * time.Millisecond)
	before := cpuTime()
	time.Sleep(time.Second)
	d := cpuTime() - before
	t.Logf("a PULL socket at rest takes %s %% of a core", strconv.FormatFloat(d.Seconds()*100, 'f', 2, 64))
	if limit := 20 * time.Millisecond; d > limit {
		t.Errorf("%s of CPU in a second of rest, want at most %s", d, limit)
	}
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &u) != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
