// Package placement measures how well the scheduler places requests: the share of prompt tokens that
// engines find cached, and the time to first token, on a trace and a fleet of modelled engines.
//
// Run plays a Trace. The scheduler and the index are the router's own; the engines are models with
// finite caches (engine); the clock is that of a synctest bubble, so an hour takes a second and the
// machine does not matter. Bound computes what no placement can exceed. TestPolicies compares the
// policies and writes docs/placement.md:
//
//	make policies                   # generated traces
//	make policies TRACE=file        # a trace in Mooncake's format
//
// With Options.Queue, requests wait in the router's admission queue (package admission) while no engine can start
// them by the router's rule (schedule.Scheduler.CanStart). TestQueueBelowSaturation and TestQueueUnderOverload
// compare that with no queue at the same arrivals; scripts/overload.py does so on processes.
//
// The model has no processes, no HTTP and no failures; scripts/policies.py compares the policies on
// processes.
package placement
