// Package completion matches the engines' reports of KV transfers with the requests that wait
// for them.
//
// Its main type is Registry. kvtransfer opens a Wait for each hand-over before the decode
// request is sent. The tiers (an agent's notifications, its completion board, a UCX worker, a
// ZMQ socket) pass reports to the Registry from their own goroutines. The Wait then has the
// transfer's bytes and duration, or its failure, long before the engine's HTTP answer.
// TransferTimes keeps the measured times of transfers between two ranks. The package opens no
// connection and ignores every report for which no Wait is open.
package completion
