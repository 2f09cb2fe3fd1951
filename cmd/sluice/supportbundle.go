package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/dustin/go-humanize/english"
	"github.com/spf13/cobra"

	"sluice/router/admin"
	"sluice/router/obs"
)

const supportBundleLong = `Writes an archive for a report about a running router: versions, the output of sluice doctor, the
configuration with secrets masked, health, workers, discovery, transfers, figures, metrics, the
latest requests with their explain records, all goroutines, a heap profile, and the end of the log
if it can be read. It prints what the archive contains; review it before you share it.

The archive contains no tokens, API keys or prompts. It contains addresses, names of workers, models
and keys, and the ids of requests. The log is read from --log, from the file to which the router's
standard error goes, or from the systemd journal. Without a running router the archive contains
what this machine says.`

const supportBundleExample = `
  sluice support-bundle
  sluice support-bundle --output /tmp/report.tar.gz --log /var/log/sluice/router.log
  sluice support-bundle --admin 127.0.0.1:9902     one of several routers`

const (
	maxBundleLog    = 4 << 20 // bytes of the end of the log
	bundleExplain   = 50      // explain records of the newest requests
	bundleDoctor    = 15 * time.Second
	journalTimeout  = 5 * time.Second
	journalLines    = 5000
	bundleFileMode  = 0o600
	bundleTimestamp = "20060102-150405"
)

func supportBundleCommand() *cobra.Command {
	var target routerFlags
	var o bundleFlags
	cmd := newCommand(cobra.Command{
		Use: "support-bundle [flags]", GroupID: groupOperate, Short: "archive what a report about a router needs", Long: supportBundleLong, Example: supportBundleExample,
	}, "0 written, 1 not written", func(cmd *cobra.Command, _ []string) int {
		return runSupportBundle(cmd, &target, &o)
	})
	target.add(cmd)
	cmd.Flags().StringVarP(&o.output, "output", "o", "", "`FILE` to write, which must not exist (default: sluice-support-TIME.tar.gz)")
	cmd.Flags().StringVar(&o.log, "log", "", "`FILE` with the router's log (default: found by its process)")
	cmd.Flags().BoolVar(&o.asJSON, "json", false, "print the list of contents as JSON")
	return cmd
}

// bundleFlags are the values of the command's flags.
type bundleFlags struct {
	output, log string

	asJSON bool
}

// bundleEntry is one file of an archive, in its list of contents.
type bundleEntry struct {
	Name  string `json:"name"`
	Bytes int    `json:"bytes"`
	What  string `json:"what"`
	Error string `json:"error,omitempty"` // why the file is missing
}

// bundle collects the files of an archive.
type bundle struct {
	entries []bundleEntry
	files   map[string][]byte
	redact  func([]byte) []byte
}

// add adds a file, or the reason why it is missing.
func (b *bundle) add(name, what string, text []byte, err error) {
	e := bundleEntry{Name: name, What: what}
	if err != nil {
		e.Error = oneLine(string(b.redact([]byte(err.Error()))))
	} else {
		if !strings.HasSuffix(name, ".gz") {
			text = b.redact(text)
		}
		b.files[name], e.Bytes = text, len(text)
	}
	b.entries = append(b.entries, e)
}

func runSupportBundle(cmd *cobra.Command, target *routerFlags, o *bundleFlags) int {
	ctx, stdout, stderr := cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr()
	rt, err := target.find()
	var several *admin.AmbiguousError
	if errors.As(err, &several) || err != nil && (target.addr != "" || target.file != "") {
		printNotFound(stderr, cmd.Name(), target.addr, "", err)
		return 1
	}
	b := &bundle{files: map[string][]byte{}, redact: redactor(append(secretValues(os.Environ()), rt.Token))}
	now := time.Now()
	path := cmp.Or(o.output, "sluice-support-"+now.UTC().Format(bundleTimestamp)+".tar.gz")
	// Claim the file first: collecting takes seconds.
	out, createErr := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, bundleFileMode)
	if createErr != nil {
		fmt.Fprintf(stderr, "sluice support-bundle: cannot write the archive: %v\n", createErr)
		return 1
	}
	b.collectMachine()
	if err != nil {
		fmt.Fprintf(stderr, "sluice support-bundle: %v; the archive contains what this machine says\n", err)
		b.add("router.json", "which router this is", nil, err)
	} else {
		fmt.Fprintf(stderr, "Reading the router at %s\n", target.describe(ctx, rt))
		b.collectRouter(ctx, rt)
	}
	if o.log != "" || rt.PID != 0 {
		text, err := recentLog(ctx, o.log, rt.PID)
		b.add("log.txt", "the end of the router's log", text, err)
	}
	writeErr := b.write(out, now)
	if err := errors.Join(writeErr, out.Close()); err != nil {
		os.Remove(path)
		fmt.Fprintf(stderr, "sluice support-bundle: cannot write %q: %v\n", path, err)
		return 1
	}
	if o.asJSON {
		err = encodeJSON(stdout, map[string]any{"file": path, "contents": b.entries})
	} else {
		err = b.list(stdout, path)
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice support-bundle:", err)
		return 1
	}
	return 0
}

// collectMachine adds what this program and machine say without a router.
func (b *bundle) collectMachine() {
	text, err := json.MarshalIndent(readVersion(), "", "  ")
	b.add("version.json", "versions of this program", text, err)
	d := doctor{timeout: bundleDoctor}
	var out bytes.Buffer
	self, err := os.Executable()
	if err == nil {
		d.probeCommand = []string{self, "doctor"}
		d.report(d.examine(), true, &out, io.Discard)
	}
	b.add("doctor.json", "libraries, devices and limits (sluice doctor)", out.Bytes(), err)
	text, err = json.MarshalIndent(map[string]any{"cpus": runtime.NumCPU(), "kernel": firstLine("/proc/version"), "load": firstLine("/proc/loadavg")}, "", "  ")
	b.add("machine.json", "processors, kernel and load", text, err)
}

// collectRouter adds what the admin API of a router returns.
func (b *bundle) collectRouter(ctx context.Context, rt admin.Runtime) {
	c := admin.NewClient(rt)
	defer c.Close()
	get := func(path string) ([]byte, error) { return c.Do(ctx, "GET", path) }
	for _, page := range []struct{ name, path, what string }{
		{"router.json", "/admin/v1/router", "which router this is"},
		{"config.json", "/admin/v1/config", "the configuration in effect, with secrets masked"},
		{"health.json", "/admin/v1/health", "readiness, and the state of the workers"},
		{"workers.json", "/admin/v1/workers", "load and KV of every rank"},
		{"discovery.json", "/admin/v1/discovery", "sources of workers"},
		{"transfers.json", "/admin/v1/transfers", "tiers of transfer notifications"},
		{"stats.json", "/admin/v1/stats", "rates and latencies of the last five minutes"},
		{"metrics.txt", "/metrics", "metrics"},
		{"goroutines.txt", "/debug/pprof/goroutine?debug=2", "the stacks of all goroutines"},
		{"heap.pb.gz", "/debug/pprof/heap", "a heap profile, for go tool pprof"},
	} {
		text, err := get(page.path)
		b.add(page.name, page.what, text, err)
	}
	text, err := get(fmt.Sprintf("/admin/v1/requests?limit=%d", maxRequests))
	b.add("requests.json", "the latest requests", text, err)
	var list struct {
		Requests []admin.Request `json:"requests"`
	}
	if err != nil || json.Unmarshal(text, &list) != nil {
		return
	}
	records := []json.RawMessage{}
	for _, r := range list.Requests[:min(len(list.Requests), bundleExplain)] {
		if _, rec, err := c.Explain(ctx, r.ID); err == nil {
			records = append(records, rec)
		}
	}
	text, err = json.MarshalIndent(records, "", "  ")
	b.add("explain.json", "the explain records of the latest "+english.Plural(len(records), "request", ""), text, err)
}

// write writes the archive.
func (b *bundle) write(w io.Writer, now time.Time) error {
	contents, err := json.MarshalIndent(b.entries, "", "  ")
	if err != nil {
		return err
	}
	b.add("contents.json", "this list", contents, nil)
	z := gzip.NewWriter(w)
	t := tar.NewWriter(z)
	for _, e := range b.entries {
		text, ok := b.files[e.Name]
		if !ok {
			continue
		}
		if err := t.WriteHeader(&tar.Header{Name: "sluice-support/" + e.Name, Mode: bundleFileMode, Size: int64(len(text)), ModTime: now, Typeflag: tar.TypeReg}); err != nil {
			return err
		}
		if _, err := t.Write(text); err != nil {
			return err
		}
	}
	return errors.Join(t.Close(), z.Close())
}

// list prints the contents of the archive.
func (b *bundle) list(w io.Writer, path string) error {
	var out bytes.Buffer
	fmt.Fprintf(&out, "%s contains:\n", path)
	for _, e := range b.entries {
		if e.Error != "" {
			fmt.Fprintf(&out, "  %-16s %9s  %s: %s\n", e.Name, "missing", e.What, e.Error)
			continue
		}
		fmt.Fprintf(&out, "  %-16s %9s  %s\n", e.Name, humanize.IBytes(uint64(e.Bytes)), e.What)
	}
	_, err := w.Write(out.Bytes())
	return err
}

// secretValues returns the values of the environment's variables that contain secrets of a router, and
// the headers that it sends to a collector of traces.
func secretValues(environ []string) (secrets []string) {
	for _, v := range environ {
		name, value, _ := strings.Cut(v, "=")
		switch {
		case strings.HasPrefix(name, "SLUICE_") && obs.IsSecret(name):
			secrets = append(secrets, value)
		case strings.HasPrefix(name, "OTEL_EXPORTER_OTLP_") && strings.HasSuffix(name, "HEADERS"):
			for header := range strings.SplitSeq(value, ",") {
				_, secret, _ := strings.Cut(header, "=")
				secrets = append(secrets, strings.TrimSpace(secret))
			}
		}
	}
	return secrets
}

// secretText matches credentials in text by their form. Only what precedes a credential, the first group,
// and what follows it, the second, is kept.
var secretText = []*regexp.Regexp{
	regexp.MustCompile(`(?i)(authorization["']?\s*[:=]\s*["']?(?:basic|digest|negotiate|token)\s+|bearer\s+)[^\s"',;\\]{4,}`),
	regexp.MustCompile(`(://)[^\s/"]+(@)`), // the user name and password of a URL
	regexp.MustCompile(`(?i)([?&](?:key|sig|signature|auth|code)=)[^\s"'&\\]+`),
	// A setting, header or parameter whose name says so; in JSON only a string.
	regexp.MustCompile(`(?i)([\w-]*(?:(?:api|engine)[_-]?key|password|passwd|secret|credentials?|cookie|token)(?:["']\s*:\s*["']|:\s+["']?|=["']?))[^\s"'&,;{}\[\]\\]{4,}`),
	regexp.MustCompile(`()sk-[A-Za-z0-9_-]{8,}`),         // a key of sluice key or of OpenAI
	regexp.MustCompile(`()hf_[A-Za-z0-9]{20,}`),          // a token of Hugging Face
	regexp.MustCompile(`()eyJ[\w-]{8,}\.[\w-]+\.[\w-]*`), // a JSON Web Token
	regexp.MustCompile(`(?s)(-----BEGIN [A-Z ]*PRIVATE KEY-----).*?(-----END [A-Z ]*PRIVATE KEY-----|\z)`),
}

// secretReplacement is the template of what replaces a match of secretText.
const secretReplacement = "${1}" + obs.MaskedValue + "${2}"

// redactor returns a function that masks the secrets, and text that looks like a credential. Secrets of
// fewer than four characters are not replaced, because they would match anything.
func redactor(secrets []string) func([]byte) []byte {
	secrets = slices.DeleteFunc(secrets, func(s string) bool { return len(s) < 4 })
	return func(text []byte) []byte {
		for _, s := range secrets {
			text = bytes.ReplaceAll(text, []byte(s), []byte(obs.MaskedValue))
		}
		for _, form := range secretText {
			text = form.ReplaceAll(text, []byte(secretReplacement))
		}
		return text
	}
}

// recentLog returns the end of a router's log: of the file path, or if that is "" of the file to which
// the process writes its standard error, or of the systemd journal.
func recentLog(ctx context.Context, path string, pid int) ([]byte, error) {
	if path != "" {
		return tail(path)
	}
	stderr := filepath.Join("/proc", strconv.Itoa(pid), "fd/2")
	if info, err := os.Stat(stderr); err == nil && info.Mode().IsRegular() {
		return tail(stderr)
	}
	ctx, cancel := context.WithTimeout(ctx, journalTimeout)
	defer cancel()
	journal := exec.CommandContext(ctx, "journalctl", "--no-pager", "--output=short-iso", "--lines="+strconv.Itoa(journalLines), "_PID="+strconv.Itoa(pid))
	journal.WaitDelay = time.Second
	text, err := journal.Output()
	if err != nil || len(bytes.TrimSpace(text)) == 0 || bytes.HasPrefix(text, []byte("-- No entries")) {
		return nil, fmt.Errorf("the router's standard error is not a file and the journal has no lines of process %d; --log FILE names the log", pid)
	}
	return text[max(0, len(text)-maxBundleLog):], nil
}

// tail returns the last lines of a file.
func tail(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	skip := max(0, info.Size()-maxBundleLog)
	if _, err := f.Seek(skip, io.SeekStart); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, maxBundleLog))
	if skip > 0 {
		if i := bytes.IndexByte(text, '\n'); i >= 0 {
			text = text[i+1:]
		}
	}
	return text, err
}
