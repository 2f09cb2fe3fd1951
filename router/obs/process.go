package obs

import (
	"bufio"
	"os"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// newProcessRegistry returns a registry of the collectors of the Go runtime and of the process.
func newProcessRegistry() *prometheus.Registry {
	r := prometheus.NewRegistry()
	r.MustRegister(collectors.NewGoCollector(collectors.WithGoCollectorRuntimeMetrics(
		collectors.GoRuntimeMetricsRule{Matcher: runtimeMetrics})), processCollector{})
	return r
}

// runtimeMetrics are those that the collector does not have by default: what delays goroutines.
var runtimeMetrics = regexp.MustCompile("^/(sched/latencies:seconds|gc/pauses:seconds|sync/mutex/wait/total:seconds)$")

// processCollector collects the process_ series. The collector of client_golang opens files before
// it counts descriptors, which fails just when no descriptor is left, and omits the parts of memory
// and the I/O.
type processCollector struct{}

var processMetrics = func() map[string]*prometheus.Desc {
	m := map[string]*prometheus.Desc{}
	for name, help := range map[string]string{
		"process_cpu_seconds_total":              "User and system CPU time.",
		"process_cpu_seconds_user_total":         "User CPU time.",
		"process_cpu_seconds_system_total":       "System CPU time.",
		"process_start_time_seconds":             "Unix time of the start of the process.",
		"process_open_fds":                       "Open file descriptors.",
		"process_max_fds":                        "Limit on open file descriptors.",
		"process_num_threads":                    "Threads of the operating system.",
		"process_resident_memory_bytes":          "Resident memory.",
		"process_resident_memory_peak_bytes":     "Highest resident memory so far.",
		"process_resident_memory_anon_bytes":     "Resident memory that no file backs.",
		"process_resident_memory_file_bytes":     "Resident memory that files back.",
		"process_resident_memory_shared_bytes":   "Resident shared memory.",
		"process_virtual_memory_bytes":           "Virtual memory.",
		"process_virtual_memory_peak_bytes":      "Highest virtual memory so far.",
		"process_major_pagefaults_total":         "Page faults that read from a disk.",
		"process_minor_pagefaults_total":         "Page faults that read from no disk.",
		"process_io_read_bytes_total":            "Bytes read by system calls.",
		"process_io_written_bytes_total":         "Bytes written by system calls.",
		"process_io_read_syscalls_total":         "System calls that read.",
		"process_io_write_syscalls_total":        "System calls that write.",
		"process_io_storage_read_bytes_total":    "Bytes read from storage.",
		"process_io_storage_written_bytes_total": "Bytes written to storage.",
	} {
		m[name] = prometheus.NewDesc(name, help, nil, nil)
	}
	return m
}()

// Describe implements prometheus.Collector.
func (processCollector) Describe(out chan<- *prometheus.Desc) {
	for _, d := range processMetrics {
		out <- d
	}
}

// Collect implements prometheus.Collector. Series that cannot be read are absent.
func (processCollector) Collect(out chan<- prometheus.Metric) {
	send := func(name string, v float64) {
		t := prometheus.GaugeValue
		if strings.HasSuffix(name, "_total") {
			t = prometheus.CounterValue
		}
		out <- prometheus.MustNewConstMetric(processMetrics[name], t, v)
	}
	sendDescriptors(send)
	var use syscall.Rusage
	if syscall.Getrusage(syscall.RUSAGE_SELF, &use) == nil {
		user, system := seconds(use.Utime), seconds(use.Stime)
		send("process_cpu_seconds_total", user+system)
		send("process_cpu_seconds_user_total", user)
		send("process_cpu_seconds_system_total", system)
		send("process_major_pagefaults_total", float64(use.Majflt))
		send("process_minor_pagefaults_total", float64(use.Minflt))
	}
	if startTime > 0 {
		send("process_start_time_seconds", startTime)
	}
	readFields("/proc/self/status", func(name string, v float64) {
		switch name {
		case "Threads":
			send("process_num_threads", v)
		case "VmRSS":
			send("process_resident_memory_bytes", v*1024)
		case "VmHWM":
			send("process_resident_memory_peak_bytes", v*1024)
		case "RssAnon":
			send("process_resident_memory_anon_bytes", v*1024)
		case "RssFile":
			send("process_resident_memory_file_bytes", v*1024)
		case "RssShmem":
			send("process_resident_memory_shared_bytes", v*1024)
		case "VmSize":
			send("process_virtual_memory_bytes", v*1024)
		case "VmPeak":
			send("process_virtual_memory_peak_bytes", v*1024)
		}
	})
	readFields("/proc/self/io", func(name string, v float64) {
		switch name {
		case "rchar":
			send("process_io_read_bytes_total", v)
		case "wchar":
			send("process_io_written_bytes_total", v)
		case "syscr":
			send("process_io_read_syscalls_total", v)
		case "syscw":
			send("process_io_write_syscalls_total", v)
		case "read_bytes":
			send("process_io_storage_read_bytes_total", v)
		case "write_bytes":
			send("process_io_storage_written_bytes_total", v)
		}
	})
}

// sendDescriptors sends the number of open file descriptors and their limit. Since Linux 6.2 the
// size of the directory is their number; on older kernels it lists them, which takes milliseconds
// for ten thousand.
func sendDescriptors(send func(string, float64)) {
	var limit syscall.Rlimit
	if syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit) == nil {
		send("process_max_fds", float64(limit.Cur))
	}
	if dir, err := os.Stat("/proc/self/fd"); err == nil && dir.Size() > 0 {
		send("process_open_fds", float64(dir.Size()))
	} else if all, err := os.ReadDir("/proc/self/fd"); err == nil {
		send("process_open_fds", float64(len(all)-1)) // one is open for the list
	}
}

func seconds(t syscall.Timeval) float64 { return float64(t.Sec) + float64(t.Usec)/1e6 }

// readFields calls field for each line "name: number" of a file of /proc.
func readFields(path string, field func(name string, v float64)) {
	f, err := os.Open(path)
	if err != nil {
		return
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		name, rest, _ := strings.Cut(lines.Text(), ":")
		if words := strings.Fields(rest); len(words) > 0 {
			if v, err := strconv.ParseFloat(words[0], 64); err == nil {
				field(name, v)
			}
		}
	}
}

// startTime is the Unix time of the start of the process; 0 if unknown.
var startTime = func() float64 {
	stat, err := os.ReadFile("/proc/self/stat")
	if err != nil {
		return 0
	}
	// The name, in brackets, may have spaces. The start is field 22, in hundredths of a second
	// since the machine's start.
	_, rest, _ := strings.Cut(string(stat), ") ")
	words := strings.Fields(rest)
	boot := 0.0
	if all, err := os.ReadFile("/proc/stat"); err == nil {
		if _, after, found := strings.Cut(string(all), "btime "); found {
			line, _, _ := strings.Cut(after, "\n")
			boot, _ = strconv.ParseFloat(line, 64)
		}
	}
	if len(words) < 20 || boot == 0 {
		return 0
	}
	ticks, err := strconv.ParseFloat(words[19], 64)
	if err != nil {
		return 0
	}
	return boot + ticks/100
}()
