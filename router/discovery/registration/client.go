package registration

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"sluice/dataplane/backoff"
)

// Client registers one worker with one router and keeps the registration alive.
type Client struct {
	Router string // base URL of the registration listener
	Token  string
	ID     string
	HTTP   *http.Client // with the TLS certificates that the router requires; nil: http.DefaultClient
	// OnResult is called after each registration or renewal; nil: no call.
	OnResult func(l *Lease, err error)
}

// Run registers a and renews the lease until ctx ends. It then deregisters the worker and returns
// the error of that call. Run reports other errors to OnResult and tries again after at most
// maxRetryPause. It returns early only if the router rejects the announcement or the credentials
// for good (400, 401, 413).
func (c *Client) Run(ctx context.Context, a *Announcement) error {
	body, err := json.Marshal(a)
	if err != nil {
		return err
	}
	failed := 0
	for {
		lease, status, err := c.put(ctx, body)
		if ctx.Err() != nil {
			break
		}
		if c.OnResult != nil {
			c.OnResult(lease, err)
		}
		wait := backoff.Delay(minRetryPause, maxRetryPause, failed)
		switch {
		case err == nil:
			failed, wait = 0, time.Duration(lease.RenewSeconds*float64(time.Second))
		case status == 400 || status == 401 || status == 413:
			return err
		default:
			failed++
		}
		select {
		case <-ctx.Done():
		case <-time.After(max(wait, minRetryPause)):
			continue
		}
		break
	}
	// ctx has ended; the call that deregisters the worker has its own deadline.
	last, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
	defer cancel()
	_, _, err = c.call(last, http.MethodDelete, nil)
	return err
}

const (
	minRetryPause = 200 * time.Millisecond
	maxRetryPause = 5 * time.Second
)

func (c *Client) put(ctx context.Context, body []byte) (*Lease, int, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	answer, status, err := c.call(ctx, http.MethodPut, body)
	if err != nil {
		return nil, status, err
	}
	l := new(Lease)
	if err := json.Unmarshal(answer, l); err != nil || l.LeaseSeconds <= 0 {
		return nil, 0, fmt.Errorf("registration: %s answered without a lease: %s", c.Router, truncate(string(answer)))
	}
	return l, status, nil
}

func (c *Client) call(ctx context.Context, method string, body []byte) ([]byte, int, error) {
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.Router, "/")+"/v1/workers/"+url.PathEscape(c.ID), bytes.NewReader(body))
	if err != nil {
		return nil, 0, err
	}
	if c.Token != "" {
		req.Header.Set("Authorization", "Bearer "+c.Token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	client := c.HTTP
	if client == nil {
		client = http.DefaultClient
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, 0, fmt.Errorf("registration: cannot reach the router: %w", err)
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(resp.Body, maxBody))
	if err != nil {
		return nil, 0, fmt.Errorf("registration: cannot read the router's answer: %w", err)
	}
	if resp.StatusCode/100 != 2 {
		var e struct {
			Error struct{ Message string }
		}
		if json.Unmarshal(answer, &e) != nil || e.Error.Message == "" {
			e.Error.Message = truncate(string(answer))
		}
		return nil, resp.StatusCode, fmt.Errorf("registration: the router answered %d: %s", resp.StatusCode, e.Error.Message)
	}
	return answer, resp.StatusCode, nil
}
