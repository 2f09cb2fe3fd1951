package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"sluice/bench/testwait"
	"sluice/router/e2e/harness"
)

// TestQuickstart gives a shell the commands of docs/quickstart.md, block by block as a reader does, and
// compares what they print with the page. Ports are free ones, and the demo and the load are shorter.
func TestQuickstart(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(harness.BuiltBinary(t), filepath.Join(dir, "bin", "sluice")); err != nil {
		t.Fatal(err)
	}
	prefill, decode, router := harness.FreePort(t), harness.FreePort(t), harness.FreePort(t)
	page := readDoc(t, "docs/quickstart.md")
	for old, port := range map[string]int{"8001": prefill, "8002": decode, "8080": router} {
		page = strings.ReplaceAll(page, "127.0.0.1:"+old, "127.0.0.1:"+strconv.Itoa(port))
	}
	page = strings.NewReplacer("--duration 20s", "--duration 3s", "--duration 8s", "--duration 2s").Replace(page)
	s := startShell(t, dir, "XDG_RUNTIME_DIR="+dir, fmt.Sprintf("SLUICE_LISTEN=127.0.0.1:%d", router), "SLUICE_ADMIN_LISTEN=127.0.0.1:0")

	listens := func(port int) {
		testwait.UntilWithin(t, 30*time.Second, fmt.Sprintf("port %d is open", port), func() bool {
			c, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
			if err == nil {
				c.Close()
			}
			return err == nil
		})
	}
	state := func(worker, want string) {
		testwait.UntilWithin(t, 30*time.Second, worker+" is "+want, func() bool {
			return regexp.MustCompile(worker + ` +\w+ +` + want).MatchString(s.run(t, "bin/sluice workers"))
		})
	}
	output, compared := "", 0
	for _, section := range strings.Split(page, "\n## ")[1:] {
		title, text, _ := strings.Cut(section, "\n")
		if title == "Build it" {
			continue
		}
		if title == "Break something" {
			if !strings.Contains(text, "`kill %1`") {
				t.Fatal("the page no longer stops the prefill engine with kill %1")
			}
			s.run(t, "kill %1")
			state("prefill-0", "unhealthy")
		}
		for _, block := range regexp.MustCompile("(?ms)^```(\\w*)\n(.*?)^```").FindAllStringSubmatch(text, -1) {
			if block[1] == "text" {
				var missing []string
				for line := range strings.Lines(block[2]) {
					if line = strings.TrimSpace(line); line != "" {
						compared++
						if !shownLine(line).MatchString(output) {
							missing = append(missing, line)
						}
					}
				}
				if missing != nil {
					t.Errorf("%s: the commands do not print\n%s\nbut\n%s", title, strings.Join(missing, "\n"), output)
				}
				continue
			}
			output = s.run(t, block[2])
			if strings.Contains(block[2], "sluice sim") {
				listens(prefill)
				listens(decode)
			}
		}
	}
	// At the end the page replaces the router. What it says of the prefill engine's return holds then too.
	s.run(t, fmt.Sprintf("bin/sluice sim --listen 127.0.0.1:%d --role prefill &", prefill))
	state("prefill-0", "ready")
	resp, err := http.Post(fmt.Sprintf("http://127.0.0.1:%d/v1/chat/completions", router), "application/json", strings.NewReader(`{"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if got := resp.Header.Get("X-Sluice-Prefill-Worker"); resp.StatusCode != 200 || got != "prefill-0" {
		t.Errorf("after the prefill engine's return: status %d, prefill worker %q", resp.StatusCode, got)
	}
	if compared < 20 {
		t.Errorf("%d lines of output compared; want 20 or more: has the page another form?", compared)
	}
}

// shownLine returns an expression for a line of output as the page shows it. Other numbers may stand for
// its numbers, except 0 and those of HTTP and JSON.
func shownLine(line string) *regexp.Regexp {
	exact := regexp.MustCompile(`^(HTTP/|X-|\{)`).MatchString(line)
	words := strings.Fields(line)
	for i, w := range words {
		number := regexp.MustCompile(`^(\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d\.\d+|\d[\d,]*(?:\.\d+)?)(\D*)$`).FindStringSubmatch(w)
		if words[i] = regexp.QuoteMeta(w); number != nil && number[1] != "0" && !exact {
			words[i] = `[\d.,:-]+` + regexp.QuoteMeta(number[2])
		}
	}
	return regexp.MustCompile(`(?m)^\s*` + strings.Join(words, `\s+`) + `\s*$`)
}

// shell is a bash with job control, as in a terminal, whose commands' output goes to one buffer.
type shell struct {
	in  io.Writer
	out harness.SyncBuffer
	n   int
}

func startShell(t *testing.T, dir string, env ...string) *shell {
	s := new(shell)
	cmd := exec.Command("bash", "-m")
	cmd.Dir, cmd.Env = dir, append(os.Environ(), env...)
	cmd.Stdout, cmd.Stderr = &s.out, &s.out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	s.in = in
	t.Cleanup(func() {
		// Each job has a process group; the router of the restart is nobody's job. All are in one session.
		for _, pid := range session(cmd.Process.Pid) {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		cmd.Wait()
	})
	return s
}

// run gives the shell commands, of which each must succeed, and returns what was printed until all have
// ended that do not run in the background.
func (s *shell) run(t *testing.T, commands string) string {
	t.Helper()
	s.n++
	before, end := len(s.out.String()), fmt.Sprintf("-- block %d ended --", s.n)
	fmt.Fprintf(s.in, "trap 'echo \"-- failed: $BASH_COMMAND\"' ERR\n%s\nprintf '\\n%%s\\n' '%s'\n", strings.TrimSpace(commands), end)
	testwait.UntilWithin(t, 60*time.Second, "the commands have ended: "+commands, func() bool {
		return strings.Contains(s.out.String()[before:], end)
	})
	out, _, _ := strings.Cut(s.out.String()[before:], end)
	if strings.Contains(out, "-- failed: ") {
		t.Errorf("a command failed of\n%s\nThe output:\n%s", commands, out)
	}
	return out
}

// session returns the processes of a session.
func session(leader int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// Behind the name in brackets: state, parent, process group, session.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		if len(fields) > 3 && string(fields[3]) == strconv.Itoa(leader) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	return pids
}
