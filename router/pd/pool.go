package pd

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/fleet"
	"sluice/router/worker"
)

// resolvePool finds the pool of the request's model and makes the plan. If a leg has no ready
// worker, it waits for one up to Timeouts.PoolWait. It answers with an error and returns false if
// the request cannot run.
func (q *request) resolvePool() bool {
	opt := q.settings
	q.model = unsafeString(q.req.Doc.String(jsonscan.KeyModel))
	q.applyView(opt.Fleet.View())
	q.internModel()
	if q.pool != nil && q.plan.Unservable {
		q.refuse(front.UnknownRoute, fmt.Sprintf("the workers of model %q do not support %s, with prefill and decode apart (family %s) or together: %s", q.pool.Model, q.req.Endpoint.Path, q.pd.Family, q.plan.Reason), 0)
		return false
	}
	if q.missingRole() == "" {
		return true
	}
	if q.pool != nil && q.lacksPrefillSource() {
		q.refuse(front.NoPrefillWorker, "the request names no prefill worker, none is configured, and a decode worker of family "+q.pd.Family+" cannot prefill", 0)
		return false
	}
	if q.pool == nil && opt.Fleet.View().AllModelsKnown() {
		q.refuseUnknownModel()
		return false
	}

	if n := q.r.waiting.Add(1); opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		q.r.waiting.Add(-1)
		q.refuse(front.PoolQueueFull, fmt.Sprintf("no %s yet, and %d requests wait already (limits.pool_waiters)", describeMissing(q.missingRole()), opt.PoolWaiters), opt.Timeouts.PoolWait)
		return false
	}
	defer q.r.waiting.Add(-1)
	began := time.Now()
	if !q.waitingSince.IsZero() {
		began = q.waitingSince
	}
	view, ok := q.awaitPlan(began.Add(opt.Timeouts.PoolWait))
	q.setQueueTime(time.Since(began))
	if ok && q.missingRole() == "" {
		return true
	}
	switch {
	case q.x.ClientGone():
		q.refuse(front.ClientGone, "the client closed the connection while waiting for a worker", 0)
	case q.pool == nil && view.AllModelsKnown():
		q.refuseUnknownModel()
	case q.pool == nil:
		q.refuseUndiscovered(view)
	default:
		q.refuseEmptyPool()
	}
	return false
}

// awaitPlan waits until every leg of the plan has a ready worker or the model is known not to
// exist. ok is false if the deadline by passes or the client disconnects first.
func (q *request) awaitPlan(by time.Time) (view *fleet.View, ok bool) {
	ctx, cancel := context.WithDeadline(context.Background(), by)
	defer cancel()
	q.x.OnClientGone(cancel)
	defer q.x.OnClientGone(nil)
	view, ok = q.settings.Fleet.Wait(ctx, func(v *fleet.View) bool {
		q.applyView(v)
		return q.missingRole() == "" || q.pool == nil && v.AllModelsKnown()
	})
	q.applyView(view)
	return view, ok
}

// unreadyPrefill names the first prefill worker that is not ready, with its state and the reason.
func (q *request) unreadyPrefill() string {
	for _, w := range q.settings.Fleet.View().Workers {
		if w.Spec.Role != worker.Prefill || !slices.Contains(w.Info().Models, q.pool.Model) {
			continue
		}
		if state, reason := w.State(); state != worker.Ready {
			return fmt.Sprintf("%s is %s: %s", w.Spec.ID, state, reason)
		}
	}
	return "no prefill worker is ready"
}

func (q *request) applyView(v *fleet.View) {
	q.view = v
	pool, ok := q.poolOf(v)
	if !ok {
		q.pool = nil
		return
	}
	q.pool = pool
	q.modelObserver = q.settings.Observer.Model(pool.Model)
	m := q.settings.pdOf(pool.Model)
	q.pd = &m.pd
	q.plan = planFor(pool, q.req.Endpoint, &q.req.Doc, m)
	if !q.wantsPrefillOnly() {
		q.plan.fallBackWithoutPrefill(pool, q.pd.DecodeOnlyFallback)
	}
	q.skipTrippedPrefill()
}

// missingRole returns the reason for the first leg without a candidate, or "" if the plan can run.
func (q *request) missingRole() front.Reason {
	switch {
	case q.pool == nil:
		return front.UnknownModel
	case q.plan.Family == nil && len(q.plan.Whole) == 0:
		if q.plan.Reason != "" {
			return front.NoDecodeWorker
		}
		return front.NoWorker
	case q.plan.Family == nil:
		return ""
	case len(q.plan.Prefill) == 0:
		return front.NoPrefillWorker
	case len(q.plan.Decode) == 0:
		return front.NoDecodeWorker
	}
	return ""
}

// describeMissing describes a reason of missingRole for an error message.
func describeMissing(reason front.Reason) string {
	switch reason {
	case front.UnknownModel:
		return "worker that serves this model"
	case front.NoPrefillWorker:
		return "healthy prefill worker"
	case front.NoDecodeWorker:
		return "healthy decode worker"
	}
	return "healthy worker"
}

func (q *request) refuseUnknownModel() {
	known := front.AllowedModels(q.req.Principal, q.settings.Fleet.View().Models)
	msg := fmt.Sprintf("the model %q does not exist here", q.model)
	if q.model == "" {
		msg = `the request names no model ("model")`
	}
	if len(known) > 0 {
		msg += "; known models: " + strings.Join(known, ", ")
	}
	q.refuseParam(front.UnknownModel, "model", msg, 0)
}

// refuseUndiscovered refuses a model that no worker has reported yet. Some workers have not
// reported their models, so a later request may succeed.
func (q *request) refuseUndiscovered(v *fleet.View) {
	msg := fmt.Sprintf("no worker serves the model %q yet; ", q.model)
	if len(v.Workers) == 0 {
		msg += "none is known"
	} else {
		msg += fmt.Sprintf("the models of %d of %d known workers are not known yet", v.WithoutModels, len(v.Workers))
	}
	q.refuse(front.NoWorker, fmt.Sprintf("%s, after waiting %s", msg, q.settings.Timeouts.PoolWait), time.Second)
}

// refuseEmptyPool answers with an error that names the pool without a ready worker and the labels
// that it requires.
func (q *request) refuseEmptyPool() {
	reason := q.missingRole()
	role, labels := "", []string(nil)
	members := 0
	switch reason {
	case front.NoPrefillWorker:
		role, labels, members = "prefill", q.pd.PrefillLabels, q.pool.Members[worker.Prefill]
	case front.NoDecodeWorker:
		role, labels, members = "decode", q.pd.DecodeLabels, q.pool.Members[worker.Decode]
	default:
		members = q.pool.Members[worker.Aggregated] + q.pool.Members[worker.Prefill] + q.pool.Members[worker.Decode]
		role = "aggregated"
		if !q.req.Endpoint.Disaggregable {
			role = "any"
		}
	}
	msg := fmt.Sprintf("no healthy %s worker for model %q", role, q.pool.Model)
	if len(labels) > 0 {
		msg += fmt.Sprintf(" with one of the labels %q", labels)
	}
	if members == 0 {
		msg += "; the pool is empty"
	} else {
		msg += fmt.Sprintf("; %d known, none ready", members)
		if len(labels) > 0 {
			msg += " with such a label"
		}
	}
	q.refuse(reason, fmt.Sprintf("%s after waiting %s", msg, q.settings.Timeouts.PoolWait), time.Second)
}
