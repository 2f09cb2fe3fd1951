package disagg

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

// findPool finds the pool of the request's model and makes the plan. Where the
// pool has no healthy worker it waits, at most Timeouts.PoolWait. It answers
// and returns false when there is nothing to run on.
func (q *request) findPool() bool {
	opt := q.r.opt()
	q.model = borrow(q.x.Doc.String(jsonscan.KeyModel, nil))
	q.takeView(opt.Fleet.View())
	q.nameModel()
	if q.pool != nil && q.plan.Unfit {
		q.x.Error(front.UnknownRoute, "", fmt.Sprintf("the workers of model %q take %s neither in two legs (family %s) nor whole: %s", q.pool.Model, q.x.Endpoint.Path, q.pd.Family, q.plan.Why), 0)
		return false
	}
	if q.missing() == "" {
		return true
	}
	if q.pool != nil && q.orphaned() {
		q.refuse(front.NoPrefillWorker, "the request names no prefill worker, none is configured, and a decode worker of family "+q.pd.Family+" cannot prefill", 0)
		return false
	}
	if q.pool == nil && opt.Fleet.View().Settled() {
		q.unknownModel()
		return false
	}

	if n := q.r.waiting.Add(1); opt.PoolWaiters > 0 && n > int64(opt.PoolWaiters) {
		q.r.waiting.Add(-1)
		q.refuse(front.PoolQueueFull, fmt.Sprintf("no %s yet, and %d requests wait already (limits.pool_waiters)", describeMissing(q.missing()), opt.PoolWaiters), opt.Timeouts.PoolWait)
		return false
	}
	defer q.r.waiting.Add(-1)
	began := time.Now()
	if !q.waitsSince.IsZero() {
		began = q.waitsSince
	}
	view, ok := q.awaitPlan(began.Add(opt.Timeouts.PoolWait))
	q.x.SetHeader("X-Sluice-Waited", time.Since(began).Round(time.Millisecond).String())
	if ok && q.missing() == "" {
		return true
	}
	switch {
	case q.x.Gone():
		q.refuse(front.ClientGone, "the client closed the connection while waiting for a worker", 0)
	case q.pool == nil && view.Settled():
		q.unknownModel()
	case q.pool == nil:
		q.unsettled(view)
	default:
		q.emptyPool()
	}
	return false
}

// awaitPlan waits until there are workers for each leg of the plan, or it is known that the
// model does not exist; ok is false where by came first, or the client left.
func (q *request) awaitPlan(by time.Time) (view *fleet.View, ok bool) {
	ctx, cancel := context.WithDeadline(context.Background(), by)
	defer cancel()
	q.x.OnGone(cancel)
	defer q.x.OnGone(nil)
	view, ok = q.r.opt().Fleet.Wait(ctx, func(v *fleet.View) bool {
		q.takeView(v)
		return q.missing() == "" || q.pool == nil && v.Settled()
	})
	q.takeView(view)
	return view, ok
}

// lacking names the prefill workers that are not ready.
func (q *request) lacking() string {
	for _, w := range q.r.opt().Fleet.View().Workers {
		if w.Spec.Role != worker.Prefill || !slices.Contains(w.Info().Models, q.pool.Model) {
			continue
		}
		if state, why := w.State(); state != worker.Ready {
			return fmt.Sprintf("%s is %s: %s", w.Spec.ID, state, why)
		}
	}
	return "no prefill worker is ready"
}

func (q *request) takeView(v *fleet.View) {
	q.seen = v
	pool, ok := q.poolOf(v)
	if !ok {
		q.pool = nil
		return
	}
	q.pool = pool
	m := q.r.pdOf(pool.Model)
	q.pd = &m.pd
	q.plan = planFor(pool, q.x.Endpoint, &q.x.Doc, m)
	if !q.asksPrefillOnly() {
		q.plan.withoutPrefill(pool, q.pd.PlainDecode)
	}
	q.restNamed()
}

// missing names the first leg without a candidate, "" when the plan can run.
func (q *request) missing() front.Reason {
	switch {
	case q.pool == nil:
		return front.UnknownModel
	case q.plan.Family == nil && len(q.plan.Whole) == 0:
		if q.plan.Why != "" {
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

// describeMissing words a reason of missing for a message.
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

func (q *request) unknownModel() {
	known := front.Allowed(q.x.Pass(), q.r.opt().Fleet.View().Models)
	msg := fmt.Sprintf("the model %q does not exist here", q.model)
	if q.model == "" {
		msg = `the request names no model ("model")`
	}
	if len(known) > 0 {
		msg += "; known models: " + strings.Join(known, ", ")
	}
	q.x.Error(front.UnknownModel, "model", msg, 0)
}

// unsettled refuses a model that no worker has told of, while there may be one
// that will: the request may succeed later.
func (q *request) unsettled(v *fleet.View) {
	msg := fmt.Sprintf("no worker serves the model %q yet; ", q.model)
	if len(v.Workers) == 0 {
		msg += "none is known"
	} else {
		msg += fmt.Sprintf("%d of %d known have not told their models", v.Unasked, len(v.Workers))
	}
	q.refuse(front.NoWorker, fmt.Sprintf("%s, after waiting %s", msg, q.r.opt().Timeouts.PoolWait), time.Second)
}

// emptyPool says which pool has no healthy worker, with the labels asked for.
func (q *request) emptyPool() {
	reason := q.missing()
	role, labels := "", []string(nil)
	members := 0
	switch reason {
	case front.NoPrefillWorker:
		role, labels, members = "prefill", q.pd.PrefillLabel, q.pool.Members[worker.Prefill]
	case front.NoDecodeWorker:
		role, labels, members = "decode", q.pd.DecodeLabel, q.pool.Members[worker.Decode]
	default:
		members = q.pool.Members[worker.Aggregated] + q.pool.Members[worker.Prefill] + q.pool.Members[worker.Decode]
		role = "aggregated"
		if !q.x.Endpoint.Disaggregable {
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
	q.refuse(reason, fmt.Sprintf("%s after waiting %s", msg, q.r.opt().Timeouts.PoolWait), time.Second)
}
