package main

import (
	"context"
	"errors"

	"sluice/router/engineapi/client"
)

// socketUser is one of many users that share a connection.
type socketUser struct {
	c   *client.Client
	req client.Request
}

func socketUsers(o *options) (func() (user, error), error) {
	ctx, cancel := context.WithTimeout(context.Background(), o.timeout)
	defer cancel()
	c, err := client.Dial(ctx, o.target, client.Options{})
	if err != nil {
		return nil, err
	}
	return func() (user, error) {
		return &socketUser{c: c, req: client.Request{
			Model: "sim", StopConditions: map[string]any{"max_tokens": o.tokens, "ignore_eos": true}, SamplingOptions: map[string]any{"temperature": 0},
		}}, nil
	}, nil
}

func (u *socketUser) request(ctx context.Context, prompt []uint32) (a answer, err error) {
	u.req.TokenIDs = prompt
	s, err := u.c.Generate(&u.req)
	if err != nil {
		return a, err
	}
	finished := false
	for {
		it, err := s.Next(ctx)
		switch {
		case err != nil:
			return a, err
		case it == nil && !finished:
			return a, errors.New("the stream ended without a finish reason")
		case it == nil:
			return a, nil
		case it.Failure != nil:
			return a, it.Failure
		}
		a.items++
		a.tokens += len(it.Data.TokenIDs)
		finished = finished || it.Data.FinishReason != ""
	}
}

func (u *socketUser) close() {}
