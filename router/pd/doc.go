// Package pd runs inference requests on engines, in one leg or in two: prefill on one
// engine and decode on another, with the KV cache handed over between them.
//
// Runner is its main type. It implements front.Handler, so the front calls it for each
// request, and the engine API calls it for requests of external preprocessors. It never
// reads a client's socket: front and relay move the bytes.
//
// The way through a request (ServeInference in runner.go):
//
//	resolvePool      find the model's pool and make the plan          pool.go, plan.go
//	resolvePrompt    find the prompt's tokens and who has them cached prompt.go
//	runWhole         one leg                                          attempt.go
//	runDisaggregated two legs, in the order of the family             attempt.go
//	  prefill → decode                                                prefill.go, decode.go
//	  both at once                                                    concurrent.go
//	  decode, and prefill only where it declines                      tryDecode
//	handleAnswer     reply, relay, or run the attempt again           answer.go, stream.go
//
// Who owns what:
//
//   - A request (request.go) keeps its state by subject and reads one configuration.
//   - A leg (leg.go) owns the reservation and the account of one engine call.
//   - kvHandover (kvhandover.go) has the states of the KV blocks behind a handle.
//   - abortRules (abort.go) say what a client's disconnect does, phase by phase.
//   - retry.go says which failures run again, where, and how often.
//   - migrate.go and resume.go continue a stream on another engine.
//
// A Family (family.go) is what is particular to one engine family's hand-over: small pure
// functions in a file of its own, without state. Its Traits tell the runner what a failure
// means. To add one, implement Family and add it to families.
package pd
