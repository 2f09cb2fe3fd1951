// Package schedule chooses a rank for a leg by cost and maintains the load that its choices cause
// until they end.
//
// Scheduler.Choose compares, in estimated milliseconds, the prefill work that remains after
// overlap, the work and the blocks reserved by running requests, and what the engine reports as
// waiting. Ties are broken at random. A Reservation lives from the choice to the end of the leg.
// Every decision is recorded with all its terms for the last N requests: see Explain. The caller is
// router/pd. The package opens no connection and knows nothing of HTTP.
//
// # The cost
//
// docs/scheduler.md describes the cost for operators, with the time a choice takes. All terms are
// estimated milliseconds, so that they can be added:
//
//	prefill  = PrefillWeight × max(0, prompt − credit) × prefill rate
//	transfer = PrefillWeight × max(0, prompt − credit) × transfer rate
//	queue    = QueueWeight × tokens to prefill reserved on the rank and not computed yet × prefill rate
//	waiting  = QueueWeight × tokens of others waiting there × prefill rate
//	decode   = DecodeWeight × blocks reserved on the rank × block rate, each block by the fraction of 256 steps that its request will run
//	pressure = DecodeWeight × tokens of this request's blocks that do not fit × prefill rate
//	eviction = EvictionWeight × cached tokens of other prompts that the new blocks displace and that are expected to be asked for again × prefill rate
//	others   = OthersWeight × by how busy ranks are × (prefill + pressure + eviction)
//
//	prefill leg = prefill + queue + waiting + eviction + others
//	decode leg  = transfer + decode + pressure + waiting
//	whole       = prefill + queue + decode + pressure + waiting + eviction + others
//
//	credit = OverlapWeight × (tokens on the device + HostWeight × on the host + DiskWeight × on disk),
//	  also for overlap that is predicted from the router's own choices,
//	  or InFlightWeight × tokens just sent there
//
// ChooseJoint chooses both legs together, including the transfer between the two, and compares them
// with the whole request on a decode rank (joint.go).
//
// The rates are learned per worker (worker.Speed) from legs that ended well: the time from choice
// to first token against the tokens that had to be computed before it, including those queued
// ahead; for decode legs against the tokens pulled; and the time per token against the blocks
// resident at the same time, minus the time of prompts computed meanwhile on the rank. A worker's
// own rates are used after eight legs, and for two minutes after its last, if they differ clearly
// from the fleet's, as far as the times of its legs do (limitRatio). Otherwise the fleet's rates are used, which start with assumptions: 10,000
// prompt tokens per second (an 8B model on one current GPU reaches two to four times that, a 70B
// model on four GPUs about that); KV pulled at 200,000 tokens per second (128 KiB per token over
// 200 Gb/s); a resident block of 16 tokens costs every step of the batch 0.6 µs of memory reads,
// over some 256 steps 0.15 ms. Only their ratios affect the choice. Options.Rates fixes them.
//
// The waiting tokens of others are what the engine reports beyond this router's own requests, so
// that no request is counted twice: tokens if the engine reports tokens (load messages), otherwise
// 1,024 per request. Pressure and eviction apply only if the number of the rank's blocks is known:
// what does not fit or is displaced is recomputed later. How much of what is displaced is asked for
// again is learned from the prompts of choices (reuseTable), how busy ranks are by looking at one
// candidate with each choice (lookBusy). In a large pool they are exact for the
// ranks that a record shows and for those with 90 % of their blocks in use; of the others a pass
// knows only whether the cache is full.
//
// Ranks whose feed is silent or broken have no overlap from the index. A record then shows the
// overlap as unknown, unless it was predicted from the router's own choices.
package schedule
