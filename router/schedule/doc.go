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
// All terms are estimated milliseconds, so that they may be added:
//
//	prefill  = PrefillWeight × max(0, prompt − OverlapWeight × cached) × 0.1 ms/token
//	transfer = PrefillWeight × max(0, prompt − OverlapWeight × cached) × 0.005 ms/token
//	queue    = QueueWeight × tokens to prefill reserved on the rank × 0.1 ms/token
//	waiting  = QueueWeight × max(0, engine's waiting − our requests there) × 102.4 ms
//	decode   = DecodeWeight × blocks reserved on the rank × 0.15 ms/block
//	pressure = DecodeWeight × blocks of this request that do not fit × block size × 0.1 ms/token
//
//	prefill leg = prefill + queue + waiting
//	decode leg  = transfer + decode + pressure + waiting
//	whole       = prefill + queue + decode + pressure + waiting
//
// The rates are assumptions, the same for every rank: 10,000 prompt tokens a
// second (an 8B model on one current GPU does two to four times that, a 70B
// model on four about that); KV pulled at 200,000 tokens a second (128 KiB a
// token over 200 Gb/s); a resident block of 16 tokens costs every step of the
// batch 0.6 µs of memory reads, over some 256 steps 0.15 ms. Only their ratios
// matter to the choice; the weights correct them. A waiting request of somebody
// else counts as 1,024 tokens; the engine's figure is used only where it exceeds
// what this router placed there, so that no request is counted twice.
// Pressure applies only where the engine reports at least 90 % of its blocks in
// use and their number is known; what does not fit is recomputed later.
package schedule
