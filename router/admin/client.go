package admin

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"sluice/router/schedule"
)

// Client calls the admin API of a running router. It is safe for concurrent use.
type Client struct {
	base  string
	token string
	http  *http.Client
}

const (
	clientTimeout = 10 * time.Second
	maxResponse   = 64 << 20
)

// NewClient returns a client of the router that rt describes.
func NewClient(rt Runtime) *Client {
	return &Client{base: "http://" + rt.Address, token: rt.Token, http: &http.Client{
		Timeout: clientTimeout,
		// No proxy from the environment: the token must not leave this machine.
		Transport: &http.Transport{DialContext: (&net.Dialer{Timeout: 2 * time.Second}).DialContext, MaxIdleConns: 2, IdleConnTimeout: 10 * time.Second},
		// A redirect could send the token elsewhere.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
}

// Error is a response with a status other than 200.
type Error struct {
	Status  int
	Code    string
	Message string
}

// Error returns Message alone, which says what was wrong; the code is for programs.
func (e *Error) Error() string { return e.Message }

// Close closes idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Do makes one call and returns the response's body. The error is an *Error if the status is not
// 200.
func (c *Client) Do(ctx context.Context, method, path string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, nil)
	if err != nil {
		return nil, fmt.Errorf("admin: cannot request %q: %w", path, err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	resp, err := c.http.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return nil, fmt.Errorf("admin: cannot reach the router at %s: %w", c.base, op.Err)
		}
		return nil, fmt.Errorf("admin: cannot request %q: %w", path, err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse))
	if err != nil {
		return nil, fmt.Errorf("admin: cannot read the answer to %q: %w", path, err)
	}
	if resp.StatusCode == http.StatusOK {
		return body, nil
	}
	return nil, responseError(resp, body, path)
}

// responseError returns the *Error of a response with a status other than 200.
func responseError(resp *http.Response, body []byte, path string) error {
	var wrong struct {
		Error struct {
			Code    string `json:"code"`
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal(body, &wrong) != nil || wrong.Error.Message == "" {
		wrong.Error.Message = fmt.Sprintf("the router answered %s to %q", resp.Status, path)
	}
	return &Error{Status: resp.StatusCode, Code: wrong.Error.Code, Message: wrong.Error.Message}
}

// Record starts a recording and returns its frames, in the form that recording.Copy reads, until
// ctx ends or the caller closes the reader.
func (c *Client) Record(ctx context.Context) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.base+"/admin/v1/record", nil)
	if err != nil {
		return nil, fmt.Errorf("admin: cannot request a recording: %w", err)
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	endless := *c.http
	endless.Timeout = 0
	resp, err := endless.Do(req)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) && op.Op == "dial" {
			return nil, fmt.Errorf("admin: cannot reach the router at %s: %w", c.base, op.Err)
		}
		return nil, fmt.Errorf("admin: cannot request a recording: %w", err)
	}
	if resp.StatusCode != http.StatusOK {
		defer resp.Body.Close()
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxBodyBytes))
		return nil, responseError(resp, body, "/admin/v1/record")
	}
	return resp.Body, nil
}

func (c *Client) get(ctx context.Context, path string, v any) error {
	body, err := c.Do(ctx, http.MethodGet, path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("admin: cannot read the answer to %q: %w", path, err)
	}
	return nil
}

// Explain returns the record of a request, decoded and as JSON.
func (c *Client) Explain(ctx context.Context, id string) (*schedule.Record, []byte, error) {
	body, err := c.Do(ctx, http.MethodGet, "/admin/v1/explain?id="+url.QueryEscape(id))
	if err != nil {
		return nil, nil, err
	}
	var rec schedule.Record
	if err := json.Unmarshal(body, &rec); err != nil {
		return nil, nil, fmt.Errorf("admin: cannot read the record of %q: %w", id, err)
	}
	return &rec, body, nil
}

// Timeline returns the timeline of a finished request, nil if the router keeps none.
func (c *Client) Timeline(ctx context.Context, id string) *Timeline {
	var t Timeline
	if c.get(ctx, "/admin/v1/timeline?id="+url.QueryEscape(id), &t) != nil {
		return nil
	}
	return &t
}

// Workers returns the state of every worker.
func (c *Client) Workers(ctx context.Context) ([]Worker, error) {
	var v struct {
		Workers []Worker `json:"workers"`
	}
	err := c.get(ctx, "/admin/v1/workers", &v)
	return v.Workers, err
}

// Requests returns the most recent requests, newest first.
func (c *Client) Requests(ctx context.Context, limit int) ([]Request, error) {
	var v struct {
		Requests []Request `json:"requests"`
	}
	err := c.get(ctx, fmt.Sprintf("/admin/v1/requests?limit=%d", limit), &v)
	return v.Requests, err
}

// Stats returns the figures, with the samples later than since.
func (c *Client) Stats(ctx context.Context, since time.Time) (*Stats, error) {
	var v Stats
	if err := c.get(ctx, fmt.Sprintf("/admin/v1/stats?since=%d", since.UnixMilli()), &v); err != nil {
		return nil, err
	}
	return &v, nil
}

// Drain stops new requests to a worker, or allows them again if on is false.
func (c *Client) Drain(ctx context.Context, workerID string, on bool) (*Worker, error) {
	body, err := c.Do(ctx, http.MethodPost, fmt.Sprintf("/admin/v1/workers/%s/drain?on=%t", url.PathEscape(workerID), on))
	if err != nil {
		return nil, err
	}
	var v Worker
	if err := json.Unmarshal(body, &v); err != nil {
		return nil, fmt.Errorf("admin: cannot read the answer to the drain of %q: %w", workerID, err)
	}
	return &v, nil
}
