package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"sluice/router/config"
)

const healthLong = `Asks the router at the listen address of the configuration whether it runs (/livez) or, with
--ready, whether it accepts requests (/readyz). It is the health check of the container image, which
has no other HTTP client. It cannot ask a router that requires client certificates or the PROXY
protocol.`

const healthExample = `
  sluice health --config /etc/sluice/sluice.yaml
  sluice health --listen 127.0.0.1:8080 --ready`

func healthCommand() *cobra.Command {
	fs := flag.NewFlagSet("sluice health", flag.ContinueOnError)
	flags := config.RegisterFlags(fs)
	var ready, asJSON bool
	var timeout time.Duration
	cmd := newCommand(cobra.Command{
		Use: "health [flags]", GroupID: groupOperate, Short: "ask a router whether it runs, for health checks of containers", Long: healthLong, Example: healthExample,
	}, "0 healthy, 1 not healthy or no answer", func(cmd *cobra.Command, _ []string) int {
		return runHealth(cmd.Context(), flags, ready, asJSON, timeout, cmd.OutOrStdout(), cmd.ErrOrStderr())
	})
	addGoFlags(cmd, fs)
	completeConfig(cmd)
	cmd.Flags().BoolVar(&ready, "ready", false, "ask whether it accepts requests (/readyz)")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print the answer as JSON")
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Second, "`DURATION` to wait for the answer")
	return cmd
}

// runHealth asks the router of a configuration, and prints its answer.
func runHealth(ctx context.Context, flags *config.Flags, ready, asJSON bool, timeout time.Duration, stdout, stderr io.Writer) int {
	cfg, err := flags.Resolve(os.Environ())
	if err != nil {
		fmt.Fprintln(stderr, err)
		return 1
	}
	host, port, err := net.SplitHostPort(cfg.Listen)
	if err != nil {
		fmt.Fprintf(stderr, "sluice health: cannot ask the router: listen %q is not HOST:PORT\n", cfg.Listen)
		return 1
	}
	// A router that listens on all addresses also listens on loopback. Its name may not resolve in a container.
	switch ip := net.ParseIP(host); {
	case host == "" || ip.Equal(net.IPv4zero):
		host = "127.0.0.1"
	case ip.Equal(net.IPv6unspecified):
		host = "::1"
	}
	scheme, path := "http", "/livez"
	if cfg.TLS.Cert != "" {
		scheme = "https"
	}
	if ready {
		path = "/readyz"
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	url := scheme + "://" + net.JoinHostPort(host, port) + path
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		fmt.Fprintf(stderr, "sluice health: cannot ask %q: %v\n", url, err)
		return 1
	}
	// The certificate has the name that clients use, not the loopback address, and the answer is public.
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
	response, err := client.Do(request)
	if err != nil {
		fmt.Fprintf(stderr, "sluice health: cannot ask the router: %v\n", err)
		return 1
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, 4<<10))
	text := oneLine(strings.TrimSpace(string(body)))
	if err != nil || response.StatusCode != http.StatusOK {
		fmt.Fprintf(stderr, "sluice health: %s: %s %s\n", url, response.Status, text)
		return 1
	}
	if !asJSON {
		fmt.Fprintln(stdout, text)
	} else if err := encodeJSON(stdout, map[string]any{"url": url, "status": response.StatusCode, "answer": text}); err != nil {
		fmt.Fprintf(stderr, "sluice health: %v\n", err)
		return 1
	}
	return 0
}
