package main

import (
	"bufio"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"

	"sluice/router/apikey"
)

const keyUsage = `Usage: sluice key [--name NAME]
       sluice key --hash [--name NAME] < FILE

Makes an API key for clients and prints what belongs into the configuration. The
key is shown once; the router keeps only its hash. With --hash the key is read
from standard input instead, one line.

Flags:
`

const keyExample = `
Examples:
  sluice key --name team-a                  a new key, to hand to team-a
  printenv THEIR_KEY | sluice key --hash    the entry for a key that exists
`

func runKey(args []string, stdout, stderr io.Writer) int {
	return keyCommand(args, os.Stdin, stdout, stderr)
}

func keyCommand(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("sluice key", flag.ContinueOnError)
	fs.SetOutput(stderr)
	name := fs.String("name", "client", "`NAME` of its holder, in logs and metrics")
	hash := fs.Bool("hash", false, "read a key that exists from standard input")
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), keyUsage)
		fs.PrintDefaults()
		fmt.Fprint(fs.Output(), keyExample)
	}
	if code, done := parse(fs, args, stdout); done {
		return code
	}
	key := apikey.New()
	if *hash {
		line, err := bufio.NewReader(io.LimitReader(stdin, 4<<10)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintf(stderr, "sluice key: cannot read the key: %v\n", err)
			return 1
		}
		if key = strings.TrimSpace(line); key == "" {
			fmt.Fprintln(stderr, "sluice key: standard input has no key; want it on the first line")
			return 2
		}
	} else {
		fmt.Fprintf(stdout, "# the key, shown this once: %s\n", key)
	}
	fmt.Fprintf(stdout, "api_keys:\n  - name: %q\n    sha256: %s\n    requests_per_minute: 0   # no limit\n    tokens_per_minute: 0     # prompts and outputs together; no limit\n",
		*name, apikey.HashOf(key))
	return 0
}
