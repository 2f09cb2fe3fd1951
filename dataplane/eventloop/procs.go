package eventloop

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
)

// procs counts the Ps (GOMAXPROCS) that are added for the threads of all Loops. A thread that waits
// by pollBrief holds a P, which the rest of the program must not lack.
//
// To set GOMAXPROCS disables the runtime's own adjustment, which since Go 1.25 follows changes of
// the container's CPU limit and affinity. So procs checks these too. When they change it has the
// runtime determine its number again and adds the threads' Ps to that. If GOMAXPROCS is set in the
// environment, that number is the base.
var procs = processorCount{limits: cpuLimits, fixed: os.Getenv("GOMAXPROCS") != ""}

// refreshInterval is how often the limits are checked.
const refreshInterval = 10 * time.Second

type processorCount struct {
	mu     sync.Mutex
	added  int
	fixed  bool          // the base is set in the environment
	limits func() string // an opaque description of the limits, compared for changes
	seen   string
	timer  *time.Timer // runs while Ps are added
}

func (p *processorCount) add(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.added += n
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + n)
	switch {
	case p.fixed:
	case p.added == 0:
		p.timer.Stop()
		p.timer = nil
		runtime.SetDefaultGOMAXPROCS() // the runtime adjusts by itself again
	case p.timer == nil:
		p.seen = p.limits()
		p.timer = time.AfterFunc(refreshInterval, p.refresh)
	}
}

// refresh adds the threads' Ps to the runtime's number where a limit has changed.
func (p *processorCount) refresh() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer == nil {
		return // no Ps are added any more
	}
	p.timer.Reset(refreshInterval)
	limits := p.limits()
	if limits == p.seen {
		return
	}
	p.seen = limits
	runtime.SetDefaultGOMAXPROCS()
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + p.added)
}

// base returns GOMAXPROCS without the added Ps.
func (p *processorCount) base() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(runtime.GOMAXPROCS(0)-p.added, 1)
}

// cpuLimits returns what the runtime derives GOMAXPROCS from: the CPU quota of the cgroup, version
// 1 or 2, and the affinity of this process; "": unreadable.
func cpuLimits() string {
	var all strings.Builder
	groups, _ := os.ReadFile("/proc/self/cgroup")
	for line := range strings.Lines(string(groups)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, file := range []string{"/sys/fs/cgroup" + parts[2] + "/cpu.max", "/sys/fs/cgroup/cpu" + parts[2] + "/cpu.cfs_quota_us"} {
			if text, err := os.ReadFile(file); err == nil {
				all.Write(text)
			}
		}
	}
	status, _ := os.ReadFile("/proc/self/status")
	if _, cpus, ok := strings.Cut(string(status), "Cpus_allowed_list:"); ok {
		cpus, _, _ = strings.Cut(cpus, "\n")
		all.WriteString(cpus)
	}
	return all.String()
}
