package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"sluice/router/apikey"
)

const keyLong = `Makes an API key for a client and prints the entry for api_keys in the configuration. The key is
shown once; the router keeps only its SHA-256 hash. With --hash the key is read from the first line
of standard input instead.`

const keyExample = `
  sluice key --name team-a                  a new key for team-a
  printenv THEIR_KEY | sluice key --hash    the entry for an existing key`

func keyCommand() *cobra.Command {
	var name string
	var hash, asJSON bool
	cmd := newCommand(cobra.Command{
		Use: "key [flags]", GroupID: groupConfigure, Short: "make an API key and its entry in the configuration", Long: keyLong, Example: keyExample,
	}, "0 printed, 1 standard input cannot be read", func(cmd *cobra.Command, _ []string) int {
		return runKey(name, hash, asJSON, cmd.InOrStdin(), cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	cmd.Flags().StringVar(&name, "name", "client", "`NAME` of the key's holder, in logs and metrics")
	cmd.Flags().BoolVar(&hash, "hash", false, "read an existing key from standard input")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the key, if it is new, and the entry as JSON")
	return cmd
}

func runKey(name string, hash, asJSON bool, stdin io.Reader, stdout, stderr io.Writer) int {
	key := apikey.New()
	if hash {
		line, err := bufio.NewReader(io.LimitReader(stdin, 4<<10)).ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			fmt.Fprintf(stderr, "sluice key: cannot read the key: %v\n", err)
			return 1
		}
		if key = strings.TrimSpace(line); key == "" {
			fmt.Fprintln(stderr, "sluice key: standard input has no key; want it on the first line")
			return 2
		}
	}
	if asJSON {
		return printKeyJSON(name, key, hash, stdout, stderr)
	}
	if !hash {
		fmt.Fprintf(stdout, "# the key, shown this once: %s\n", key)
	}
	fmt.Fprintf(stdout, "api_keys:\n  - name: %q\n    sha256: %s\n    requests_per_minute: 0   # no limit\n    tokens_per_minute: 0     # prompts and outputs together; no limit\n",
		name, apikey.HashOf(key))
	return 0
}

// printKeyJSON prints the entry as JSON, with the key itself if the command has made it.
func printKeyJSON(name, key string, existing bool, stdout, stderr io.Writer) int {
	out := struct {
		Key    string `json:"key,omitempty"`
		Name   string `json:"name"`
		SHA256 string `json:"sha256"`
	}{key, name, apikey.HashOf(key).String()}
	if existing {
		out.Key = ""
	}
	if err := encodeJSON(stdout, out); err != nil {
		fmt.Fprintf(stderr, "sluice key: %v\n", err)
		return 1
	}
	return 0
}
