package eventloop

import (
	"os"
	"runtime"
	"strings"
	"sync"
	"time"
)

// procs keeps count of the Ps (GOMAXPROCS) added for the threads of all Loops: a
// thread that waits awake holds one, which the rest of the program must not lack.
//
// To set the number takes it out of the hands of the runtime, which since Go 1.25
// follows a container's limit and the CPUs allowed when those change. So they are looked
// at here too, and when one has changed the runtime is told to find its own number
// again, to which the threads' Ps are added anew. Not so where GOMAXPROCS stands in the
// environment: then that is the number.
var procs = processorCount{limits: cpuLimits, fixed: os.Getenv("GOMAXPROCS") != ""}

// refreshInterval is how often limits are looked at.
const refreshInterval = 10 * time.Second

type processorCount struct {
	mu     sync.Mutex
	added  int
	fixed  bool          // the number is not the runtime's own
	limits func() string // whatever they are, so that a change shows
	seen   string
	timer  *time.Timer // while something is added
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
		runtime.SetDefaultGOMAXPROCS() // the runtime follows by itself
	case p.timer == nil:
		p.seen = p.limits()
		p.timer = time.AfterFunc(refreshInterval, p.refresh)
	}
}

// refresh adds the threads' Ps to the runtime's own number where a limit has changed.
func (p *processorCount) refresh() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.timer == nil {
		return // nothing is added any more
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

// base is how many there are without the added ones.
func (p *processorCount) base() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return max(runtime.GOMAXPROCS(0)-p.added, 1)
}

// cpuLimits are what the runtime makes its number of: the cgroup's quota, in either
// version, and the CPUs that this process may use. "" where there is none to be read.
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
