// Package schedule chooses a rank for a leg by cost and keeps the load that
// its choices make until they end.
//
// Scheduler.Choose weighs, in estimated milliseconds, the prefill work left
// after overlap, the work and the blocks reserved by requests under way and
// what the engine says is waiting; ties are broken at random. A Reservation
// lives from choice to end. Every decision is kept with all its terms for the
// last N requests: see Explain. Called by disagg; it opens no connection and
// knows nothing of HTTP.
//
// # The cost
//
// (docs/scheduler.md has it for operators, with what the choice itself costs.) All terms are estimated milliseconds, so that they may be added:
//
//	prefill  = PrefillWeight × max(0, prompt − credit) × prefill rate
//	transfer = PrefillWeight × max(0, prompt − credit) × transfer rate
//	queue    = QueueWeight × tokens to prefill reserved on the rank × prefill rate
//	waiting  = QueueWeight × tokens of others waiting there × prefill rate
//	decode   = DecodeWeight × blocks reserved on the rank × block rate, each block by the share of 256 steps that its request will run
//	pressure = DecodeWeight × tokens of this request's blocks that do not fit × prefill rate
//
//	prefill leg = prefill + queue + waiting
//	decode leg  = transfer + decode + pressure + waiting
//	whole       = prefill + queue + decode + pressure + waiting
//
//	credit = OverlapWeight × (tokens on the device + HostWeight × on the host + DiskWeight × on disk),
//	  or that much for a guess of the router's own choices,
//	  or InFlightWeight × tokens just sent there
//
// ChooseJoint takes both legs at once, with the transfer between the two, and holds
// them against the whole request on a decode rank (pair.go).
//
// The rates are learned, worker by worker (worker.Speed), from legs that ended
// well: the time from choice to first token against the tokens that had to be
// computed before it, those queued ahead included; of decode legs against the
// tokens pulled; and the time a token took against the blocks resident beside it,
// less what prompts computed meanwhile on the rank took.
// A worker is judged by its own rates after eight legs, and for two minutes after
// its last, where they are well apart from the fleet's; else by the fleet's, which
// begin with an assumption: 10,000 prompt tokens a second (an 8B model on one
// current GPU does two to four times that, a 70B model on four about that); KV
// pulled at 200,000 tokens a second (128 KiB a token over 200 Gb/s); a resident
// block of 16 tokens costs every step of the batch 0.6 µs of memory reads, over
// some 256 steps 0.15 ms. Only their ratios matter to the choice. Options.Rates
// fixes them.
//
// What waits for others is what the engine says beyond what this router placed
// there, so that no request is counted twice: tokens where it tells of tokens
// (load messages), else 1,024 for a request. Pressure applies only where the
// engine reports at least 90 % of its blocks in use and their number is known;
// what does not fit is recomputed later.
//
// Ranks whose feed is silent or broken have no overlap from the index; a record
// then says that it is unknown, unless the router's own choices let it guess.
package schedule
