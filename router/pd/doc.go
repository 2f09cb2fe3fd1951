// Package pd runs inference requests on engines, in one leg or in two: prefill on one
// engine and decode on another, with the KV cache handed over between them.
//
// Runner is its main type. It implements front.Handler, so the front calls it for each
// request, and the engine API calls it for requests of external preprocessors. It never
// reads a client's socket: front and relay move the bytes.
//
// The steps of a request (ServeInference in runner.go):
//
//	resolvePool      find the model's pool and make the plan             pool.go, plan.go
//	readAdmission    find the class, the tenant and the targets          classes.go
//	applySteering    restrict the plan to what headers ask for           steering.go
//	beginTurn        count the turn of its session                       session.go
//	refuseEarly      refuse a request whose target cannot be met         admission.go
//	resolvePrompt    find the prompt's tokens and the ranks' cached part prompt.go
//	awaitAdmission   wait until a rank can start the request             admission.go
//	runWhole         one leg                                             attempt.go
//	runDisaggregated two legs, in the order of the family                attempt.go
//	  prefill → decode                                                   prefill.go, decode.go
//	  both at once                                                       concurrent.go
//	  decode, and prefill only if it declines                            answer.go (tryDecode)
//	handleAnswer     reply, relay, or run the attempt again              answer.go, stream.go
//
// A request that waits in awaitAdmission is started by the dispatcher of package admission: on its
// goroutine, TryStart reserves the rank of the first leg. If no rank has capacity, it may ask streams of
// lower classes to leave their engines and wait in the queue themselves (preempt.go), and a request whose KV
// fits into no rank may have one kept for it (kvclaims.go).
//
// State:
//
//   - A request (request.go) groups its state by subject and reads one configuration until it ends;
//     settings.go lists the shared state that follows a reload at once.
//   - A leg (leg.go) owns the reservation and the account of one engine call. Until it starts, the
//     request owns what TryStart has reserved (releaseAdmitted) and the decode rank that it chose before
//     its leg (reservedDecode), and a function owns the reservation of a choice that it holds as a local value.
//
// Rules that need neither a rank to choose nor a leg to send are packages of their own:
//
//   - family: the hand-over protocol of each engine family, and what engines' answers mean.
//   - abort: what happens when a client disconnects or a leg ends early, and who frees the KV.
//   - migration: which streams another engine may continue, and the request for it.
//   - reqbody: what the client's body asks for.
//
// abort.go, migrate.go and resume.go apply these rules to a request. retry.go says which failures run
// again, where, and how often.
package pd
