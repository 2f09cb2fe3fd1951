package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/pebbe/zmq4"

	"sluice/dataplane/zmtp"
	"sluice/native/cuda"
	"sluice/native/dl"
	"sluice/native/tokenizer"
	"sluice/nixl"
	"sluice/router/app"
	"sluice/router/config"
)

// probeArgument selects the probe process, `sluice doctor @probe`, which loads and tries one
// library. The process reads the request from standard input and writes the finding to
// descriptor 3, because libraries print to standard output and standard error.
const probeArgument = "@probe"

type probeRequest struct {
	Library string        `json:"library"` // nixl, ucx, zmq, tokenizer, model (a model's tokenizer) or cuda
	Config  string        `json:"config"`  // for model: the file of the configuration
	Model   string        `json:"model"`   // for model: its name there
	NIXL    string        `json:"nixl"`
	UCX     string        `json:"ucx"`
	Python  []string      `json:"python"`
	Timeout time.Duration `json:"timeout"`
}

// probeMain is the main function of the probe process.
func probeMain(in io.Reader, out *os.File) int {
	var r probeRequest
	if out == nil || json.NewDecoder(in).Decode(&r) != nil {
		fmt.Fprintln(os.Stderr, "sluice doctor: this command is internal; sluice doctor starts it")
		return 2
	}
	var f finding
	switch r.Library {
	case "nixl":
		f = probeNIXL(&r)
	case "ucx":
		f = probeUCX(&r)
	case "zmq":
		f = probeZMQ()
	case "tokenizer":
		f = probeTokenizer()
	case "model":
		f = probeModel(&r)
	default:
		f = probeCUDA()
	}
	if json.NewEncoder(out).Encode(f) != nil {
		return 1
	}
	// Exit at once, so that threads of the libraries cannot delay the end of the process.
	os.Exit(0)
	return 0
}

// runProbe starts a probe process and returns its finding. A process that crashes or exceeds the
// timeout yields a finding that says so.
func (d *doctor) runProbe(r probeRequest) finding {
	r.Timeout = d.timeout * 9 / 10
	in, err := json.Marshal(r)
	if err != nil {
		return finding{State: findingOff, Detail: err.Error()}
	}
	answer, stderr, err := os.Pipe()
	if err != nil {
		return finding{State: findingOff, Detail: "cannot start the probe: " + err.Error()}
	}
	defer answer.Close()
	ctx, cancel := context.WithTimeout(context.Background(), d.timeout)
	defer cancel()
	var lastOutput tailBuffer
	cmd := exec.CommandContext(ctx, d.probeCommand[0], append(d.probeCommand[1:], probeArgument)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = bytes.NewReader(in), &lastOutput, &lastOutput, []*os.File{stderr}
	cmd.WaitDelay = time.Second // a grandchild may keep the pipes open
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	err = cmd.Start()
	stderr.Close()
	if err != nil {
		return finding{State: findingOff, Detail: "cannot start the probe: " + err.Error()}
	}
	// Read before Wait: the process blocks if the finding exceeds the pipe's buffer.
	_ = answer.SetReadDeadline(time.Now().Add(d.timeout + time.Second))
	var f finding
	decoded := json.NewDecoder(io.LimitReader(answer, 1<<20)).Decode(&f)
	err = cmd.Wait()
	switch {
	case decoded == nil && f.State != "":
		return f
	case ctx.Err() != nil:
		return finding{State: findingHung, Detail: fmt.Sprintf("no answer within %s; the probe was killed%s", d.timeout, lastOutput.last()),
			Advice: "a library that hangs here would disable its tier in serve: name another with --nixl or --ucx, or find with --timeout 5m and gdb -p what it waits for"}
	default:
		if err == nil {
			err = errNoAnswer
		}
		return finding{State: findingCrashed, Detail: fmt.Sprintf("the probe ended without an answer: %v%s", err, lastOutput.last()),
			Advice: "this library would crash the router: disable it (transfers.nixl: off), or name another with --nixl or --ucx"}
	}
}

// tailBuffer is a writer that keeps only the last bytes written to it.
type tailBuffer struct{ b []byte }

func (t *tailBuffer) Write(p []byte) (int, error) {
	t.b = append(t.b, p...)
	if n := len(t.b) - 4096; n > 0 {
		t.b = append(t.b[:0], t.b[n:]...)
	}
	return len(p), nil
}

// last returns the last line written.
func (t *tailBuffer) last() string {
	lines := strings.Split(strings.TrimSpace(string(t.b)), "\n")
	if l := lines[len(lines)-1]; l != "" {
		return "; its last output was " + fmt.Sprintf("%.200q", l)
	}
	return ""
}

func attemptLines(attempts []nixl.Attempt) (all []string) {
	for _, a := range attempts {
		switch {
		case a.Path == "" && a.Code == dl.LoadAbsent: // the process itself does not contain the library: not worth a line
		case a.Code == dl.LoadOK || a.Code == dl.LoadAbsent:
			all = append(all, fmt.Sprintf("%s: %s", a.Path, a.Code))
		default:
			all = append(all, fmt.Sprintf("%s: %s: %s", a.Path, a.Code, a.Reason))
		}
	}
	return all
}

// loadFinding converts the outcome of loading a library to a finding. ok reports whether the
// library was loaded; the caller then continues with its own checks.
func loadFinding(l *nixl.Library, err error, missing, broken string) (f finding, ok bool) {
	if err == nil {
		return finding{Attempts: attemptLines(l.Attempts)}, true
	}
	f = finding{State: findingOff, Detail: err.Error(), Advice: missing}
	var e *nixl.LoadError
	if errors.As(err, &e) {
		f.Attempts = attemptLines(e.Attempts)
		f.Detail = "no usable library"
		for _, a := range e.Attempts {
			if a.Code != dl.LoadAbsent {
				f.Detail, f.Advice = fmt.Sprintf("%s: %s", a.Path, a.Code), broken
				break
			}
		}
		if e.Hung {
			f.State = findingHung
		}
	}
	return f, false
}

const (
	noNIXL      = "pip install nixl-cu12 (or nixl-cu13) in the version that the engines run, and name its environment: transfers.python, --python; or its folder: transfers.nixl_library"
	badNIXL     = "install the engines' own version of nixl-cu12 or nixl-cu13 (0.10 or later) whole, or name another with transfers.nixl_library"
	noUCX       = "comes with the NIXL wheel; alone: pip install libucx-cu12, or apt install libucx0 (1.13 or later); name it with SLUICE_UCX_LIBRARY or --ucx"
	noTokenizer = "the packages contain libsluice_tokenizer.so; make build builds it where cargo is installed; SLUICE_TOKENIZER_LIBRARY names another one"
	noSelfTest  = "UCX found no way to itself: see UCX_TLS and UCX_NET_DEVICES in the environment (tcp over lo must be among them)"
)

func probeNIXL(r *probeRequest) finding {
	search := nixl.Search{Path: r.NIXL, Python: r.Python}
	l, err := nixl.Load(search, r.Timeout)
	f, ok := loadFinding(l, err, noNIXL, badNIXL)
	if !ok {
		return f
	}
	return awaitSelfTest(f, r, nixl.StartAgentTier(nixl.AgentTierConfig{Agent: nixl.Config{Name: "sluice-doctor", Search: search, StartTimeout: r.Timeout}}))
}

// probeTokenizer loads the native tokenizer, and with it a model of its own that it tries.
func probeTokenizer() finding {
	l, err := tokenizer.Open("")
	if err != nil {
		f := finding{State: findingOff, Detail: "no usable library; serve asks the engines for token ids, or estimates them", Advice: noTokenizer}
		var e *tokenizer.LoadError
		if errors.As(err, &e) {
			for _, a := range e.Attempts {
				f.Attempts = append(f.Attempts, fmt.Sprintf("%s: %s: %s", a.Path, a.Code, a.Reason))
				if a.Code != dl.LoadAbsent {
					f.Detail = fmt.Sprintf("%s: %s", a.Path, a.Code)
				}
			}
		}
		return f
	}
	if err := l.SelfTest(); err != nil {
		return finding{State: findingOff, Detail: fmt.Sprintf("%s fails its self-test: %v", l.Path(), err), Advice: noTokenizer}
	}
	return finding{State: findingOK, Detail: fmt.Sprintf("%s, %s", l.Version(), l.Path())}
}

// probeModel tries the tokenizer of a configured model.
func probeModel(r *probeRequest) finding {
	cfg, err := config.LoadWithEnv(r.Config, os.Environ())
	if err != nil {
		return finding{State: findingOff, Detail: err.Error()}
	}
	detail, err := app.TryTokenizer(cfg, r.Model)
	if err != nil {
		return finding{State: findingOff, Detail: err.Error()}
	}
	return finding{State: findingOK, Detail: detail}
}

const badModels = "serve asks the engines for these models' token ids: give models.NAME.tokenizer the folder that the engines load, see docs/tokens.md"

// tokenizerFinding tries the tokenizer library and then, each in a process of its own, the tokenizers of the
// configured models.
func (d *doctor) tokenizerFinding() finding {
	r := d.probe
	r.Library = "tokenizer"
	f := d.runProbe(r)
	if f.State != findingOK {
		return f
	}
	bad := 0
	for _, name := range slices.Sorted(maps.Keys(d.tokenizers)) {
		r.Library, r.Model = "model", name
		m := d.runProbe(r)
		if m.State != findingOK {
			bad++
		}
		f.Attempts = append(f.Attempts, fmt.Sprintf("%s, %s: %s: %s", name, d.tokenizers[name], m.State, m.Detail))
	}
	if bad > 0 {
		f.State, f.Advice = findingOff, badModels
		f.Detail += fmt.Sprintf("; the tokenizers of %d of %d models cannot be used", bad, len(d.tokenizers))
	}
	return f
}

func probeUCX(r *probeRequest) finding {
	search := nixl.Search{Path: r.NIXL, Python: r.Python}
	l, err := nixl.LoadUCX(r.UCX, search, r.Timeout)
	f, ok := loadFinding(l, err, noUCX, noUCX)
	if !ok {
		return f
	}
	return awaitSelfTest(f, r, nixl.StartUCXTier(nixl.UCXTierConfig{
		UCX: nixl.UCXConfig{Agent: nixl.Config{Name: "sluice-doctor", Search: search, StartTimeout: r.Timeout}, Path: r.UCX}}))
}

// awaitSelfTest waits for the end of a tier's self-test, for at most the request's timeout, and
// adds the result to f.
func awaitSelfTest(f finding, r *probeRequest, t *nixl.AgentTier) finding {
	state, reason := t.Status()
	for end := time.Now().Add(r.Timeout); state == nixl.TierStarting && time.Now().Before(end); state, reason = t.Status() {
		time.Sleep(5 * time.Millisecond)
	}
	f.Detail = reason
	switch state {
	case nixl.TierUp:
		f.State = findingOK
		if ucx := nixl.ResidentUCX(); len(ucx) > 1 {
			f.State = findingLimited
			f.Detail += "; two UCX are in the process: " + strings.Join(ucx, ", ")
			f.Advice = "two copies of UCX in one process hang or crash: remove one from LD_LIBRARY_PATH or LD_PRELOAD"
		}
	case nixl.TierStarting:
		f.State, f.Advice = findingHung, noSelfTest
	default:
		f.State, f.Advice = findingOff, noSelfTest
	}
	return f
}

// probeZMQ lets libzmq send a message to a socket of Sluice's own ZMQ implementation over the
// loopback.
func probeZMQ() finding {
	major, minor, patch := zmq4.Version()
	f := finding{State: findingOff, Advice: "the loopback does not carry ZMQ: see the firewall and the sandbox of this process"}
	came := make(chan struct{}, 1)
	err := func() error {
		pull, err := zmtp.Listen(zmtp.Options{Endpoint: "tcp://127.0.0.1:*", Message: func([]byte) { came <- struct{}{} }})
		if err != nil {
			return err
		}
		defer pull.Close()
		push, err := zmq4.NewSocket(zmq4.PUSH)
		if err != nil {
			return err
		}
		if err = errors.Join(push.SetLinger(0), push.SetSndtimeo(3*time.Second), push.Connect(pull.Endpoint())); err == nil {
			_, err = push.Send("sluice", 0)
		}
		if err != nil {
			return err
		}
		select {
		case <-came:
			return nil
		case <-time.After(3 * time.Second):
			return errors.New("the message did not arrive within 3s")
		}
	}()
	if err != nil {
		f.Detail = fmt.Sprintf("libzmq %d.%d.%d, built in; a message over the loopback: %v", major, minor, patch, err)
		return f
	}
	return finding{State: findingOK, Detail: fmt.Sprintf("libzmq %d.%d.%d; a message went over the loopback to the router's own socket", major, minor, patch)}
}

func probeCUDA() finding {
	n, err := cuda.Devices()
	if err != nil {
		return finding{State: findingOff, Detail: err.Error(),
			Advice: "needed only to keep KV in a GPU's memory here, which no part of the router does by itself; else install NVIDIA's driver, or run the container with --gpus"}
	}
	if n == 0 {
		return finding{State: findingOff, Detail: "the CUDA driver sees no GPU", Advice: "see CUDA_VISIBLE_DEVICES and nvidia-smi"}
	}
	v, err := cuda.Open(0)
	if err != nil {
		return finding{State: findingOff, Detail: err.Error(), Advice: "see nvidia-smi: the GPU may be in exclusive use, or full"}
	}
	return finding{State: findingOK, Detail: fmt.Sprintf("%d GPUs, driver for CUDA %d.%d", n, v/1000, v%1000/10)}
}
