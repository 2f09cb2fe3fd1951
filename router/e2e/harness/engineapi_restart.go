package harness

import (
	"context"
	"testing"

	"sluice/bench/testwait"
	"sluice/router/engineapi/client"
)

// DialRetry connects to a framed socket and retries until it is open.
func DialRetry(t *testing.T, addr string) *client.Client {
	t.Helper()
	var c *client.Client
	testwait.UntilWithin(t, TestTimeout, "connected to "+addr, func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), TestTimeout)
		defer cancel()
		var err error
		c, err = client.Dial(ctx, addr, client.Options{})
		return err == nil
	})
	t.Cleanup(func() { c.Close() })
	return c
}
