//go:build cgo

package notify

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	zmq "github.com/pebbe/zmq4"

	"sluice/bench/testwait"
)

// senderVariable is an environment variable that makes this test binary send reports to the
// endpoint in its value.
const senderVariable = "SLUICE_NOTIFY_TEST_SENDER"

func TestMain(m *testing.M) {
	if to := os.Getenv(senderVariable); to != "" {
		sendReports(to, reports)
		return
	}
	os.Exit(m.Run())
}

// reports is the number of messages sent.
const reports = 3000

// sampledReports is the prefix of messages in this benchmark, as "SLUICE1" is of the
// connector's reports.
const sampledReports = "SLUICE1 "

// sendReports sends one message per millisecond, each containing its send time.
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
		testwait.Pace(time.Until(next))
		next = next.Add(time.Millisecond)
		if _, err := s.SendBytes(strconv.AppendInt([]byte(sampledReports), time.Now().UnixNano(), 10), 0); err != nil {
			println(err.Error())
			os.Exit(1)
		}
	}
	s.Close()
	zmq.Term() // returns when all messages are sent
}

// BenchmarkReportOverZMQ measures the latency from the send by libzmq in another process to the
// Go handler, and the CPU time of this process, at one message per millisecond. It compares the
// Listener with a PULL socket of libzmq, which needs a thread of its own and another that waits
// in C.
func BenchmarkReportOverZMQ(b *testing.B) {
	for name, open := range map[string]func(*testing.B, func([]byte)) (string, func()){"own": openListener, "libzmq": openLibzmq} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				times := make(chan time.Duration, 4096)
				endpoint, end := open(b, func(m []byte) {
					if sent, err := strconv.ParseInt(strings.TrimPrefix(string(m), sampledReports), 10, 64); err == nil {
						times <- time.Duration(time.Now().UnixNano() - sent)
					}
				})
				cmd := exec.Command(os.Args[0])
				cmd.Env = append(os.Environ(), senderVariable+"="+endpoint)
				cpu, began := cpuTime(), time.Now()
				if out, err := cmd.CombinedOutput(); err != nil {
					b.Fatalf("%v: %s", err, out)
				}
				b.ReportMetric(100*float64(cpuTime()-cpu)/float64(time.Since(began)), "%cpu")
				b.ReportMetric(float64((cpuTime()-cpu).Nanoseconds())/1e3/reports, "µs-cpu/msg")
				var all []time.Duration
				for late := time.After(30 * time.Second); len(all) < reports; {
					select {
					case d := <-times:
						all = append(all, d)
					case <-late:
						b.Fatalf("%d of %d came", len(all), reports)
					}
				}
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)/2].Nanoseconds())/1e3, "p50-µs")
				b.ReportMetric(float64(all[len(all)*99/100].Nanoseconds())/1e3, "p99-µs")
				b.ReportMetric(0, "ns/op")
				end()
			}
		})
	}
}

func openListener(b *testing.B, take func([]byte)) (endpoint string, end func()) {
	listener, err := Listen(Options{Endpoint: "tcp://127.0.0.1:*", Report: func(m []byte) bool { take(m); return true }})
	if err != nil {
		b.Fatal(err)
	}
	return listener.Endpoint(), listener.Close
}

func openLibzmq(b *testing.B, take func([]byte)) (endpoint string, end func()) {
	ctx, err := zmq.NewContext()
	if err != nil {
		b.Fatal(err)
	}
	pull, err := ctx.NewSocket(zmq.PULL)
	if err != nil {
		b.Fatal(err)
	}
	if err := errors.Join(pull.SetLinger(0), pull.SetRcvtimeo(10*time.Millisecond), pull.Bind("tcp://127.0.0.1:*")); err != nil {
		b.Fatal(err)
	}
	endpoint, _ = pull.GetLastEndpoint()
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			if m, err := pull.RecvBytes(0); err == nil {
				take(m)
			}
			select {
			case <-stop:
				pull.Close()
				return
			default:
			}
		}
	}()
	return endpoint, func() { close(stop); <-done; ctx.Term() }
}

// TestIdle: an idle socket uses almost no CPU.
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
