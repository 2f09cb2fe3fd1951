package engineapi

import (
	"context"
	"errors"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/dataplane/relay"
)

// ServeInference implements front.Handler. It answers POST /v1/engine/generate and passes all
// other requests to the Runner.
func (e *Engine) ServeInference(x front.Exchange) {
	req := x.Request()
	if req.Endpoint.Kind != front.Preprocessed {
		e.opt.Runner.ServeInference(x)
		return
	}
	if !e.opt.HTTP {
		x.Error(front.UnknownRoute, "", req.Endpoint.Path+" is not served here; set engine_api.http to true to serve it", 0)
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	x.OnClientGone(cancel)
	p, err := e.prepare(ctx, req.Doc.Body, req.Principal, x.LeaseMemory)
	x.OnClientGone(nil)
	if err != nil {
		reason, field := refusal(err)
		after := time.Duration(0)
		if reason == front.BudgetExhausted {
			after = time.Second
		}
		x.Error(reason, field, err.Error(), after)
		return
	}
	defer p.mem.Release()
	if err := req.Doc.Scan(p.body, jsonscan.Limits{}); err != nil {
		x.Error(front.BadField, "", err.Error(), 0)
		return
	}
	if p.context.id != "" && len(x.Header("X-Request-Id")) == 0 {
		req.RequestID = p.context.id
	}
	for _, h := range p.responseHeaders {
		x.OverrideRequestHeader(h.Name, h.Value)
	}
	if len(x.Header("traceparent")) == 0 { // the header takes precedence over the body
		for _, h := range p.context.trace {
			x.OverrideRequestHeader(h.Name, h.Value)
		}
	}
	req.Endpoint, req.Attached = &endpoints[p.pool.dialect], p.hints
	req.Converter = func(chunked bool) relay.Converter {
		c := e.converter(p, x.ResponseHeader)
		c.deadlinePassed = p.deadlinePassed
		return newSSEWriter(c, chunked)
	}
	e.opt.Runner.ServeInference(x)
}

// refusal maps an error of prepare to the reason of the response and the field at fault.
func refusal(err error) (reason front.Reason, field string) {
	var f *FieldError
	var d *modelDenied
	switch {
	case errors.Is(err, errBudgetExhausted):
		return front.BudgetExhausted, ""
	case errors.As(err, &d):
		return front.ModelNotAllowed, "model"
	case !errors.As(err, &f):
		return front.BadField, ""
	case f.Forbidden:
		return front.ForbiddenField, f.shownName()
	}
	return front.BadField, f.shownName()
}
