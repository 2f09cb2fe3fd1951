package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"sluice/router/config"
)

// jsonMessages writes each line as a JSON object with the member "message", for the standard error of
// a command with --json. Text that does not end a line, such as a question or a progress display on a
// terminal, passes as it is.
type jsonMessages struct{ w io.Writer }

func (m jsonMessages) Write(p []byte) (int, error) {
	if !bytes.HasSuffix(p, []byte("\n")) {
		return m.w.Write(p)
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	for line := range bytes.Lines(p) {
		if text := strings.TrimSpace(string(line)); text != "" {
			_ = e.Encode(map[string]string{"message": text}) // a map of strings
		}
	}
	if _, err := m.w.Write(b.Bytes()); err != nil {
		return 0, err
	}
	return len(p), nil
}

// wantsJSON says whether args, which may have errors, give cmd the flag --json. It is for the
// messages about them.
func wantsJSON(cmd *cobra.Command, args []string) bool {
	f := cmd.Flags().Lookup("json")
	if f == nil || f.Value.Type() != "bool" {
		return false
	}
	for _, arg := range args {
		switch strings.TrimPrefix(arg, "-") {
		case "-":
			return false
		case "-json", "-json=true", "json":
			return true
		}
	}
	return false
}

// logFormat returns log.format of the arguments of serve or sidecar, which may have errors, and of
// what they name. It is for the messages about them.
func logFormat(args []string) string {
	fs := flag.NewFlagSet("", flag.ContinueOnError)
	flags := config.RegisterFlags(fs)
	for i, arg := range args {
		name, value, hasValue := strings.Cut(strings.TrimLeft(arg, "-"), "=")
		if !hasValue && i+1 < len(args) {
			value = args[i+1]
		}
		switch name {
		case "config", "log-format", "set":
			_ = fs.Set(name, value) // its error is not the one to report
		}
	}
	return flags.LogFormat(os.Environ())
}

// printUsageError prints an error of the command line of cmd, in the form of the command's messages.
func printUsageError(stderr io.Writer, cmd *cobra.Command, args []string, text string) {
	format := "text"
	if cmd.Annotations[logsWarnings] != "" {
		format = logFormat(args)
	}
	printFailure(stderr, format, cmd.CommandPath(), text)
}
