// Package completion tells what became of the KV transfers that requests wait for.
//
// Its main type is Book. The router's runner opens a Wait for each hand-over before
// decode is sent; the tiers (an agent's notifications, its board, a ZMQ socket) give
// the Book what engines report, from their own goroutines; the Wait then knows bytes
// and time, or that the transfer failed, long before the engine's answer says so.
// Pairs keeps what transfers between two workers took. It opens no connection and
// believes nothing that no Wait is open for.
package completion
