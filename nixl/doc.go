// Package nixl tells by what means this process can learn of a KV transfer.
//
// Tier is its one type so far: every transfer is observed through the engines'
// HTTP answers, and the package says so, with the reason. The NIXL agent, UCX
// and ZMQ notification tiers take their places behind the same type. It is read
// by health, metrics and the log, never on the path of a request.
package nixl
