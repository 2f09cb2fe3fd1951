// Package fleet keeps the membership: which workers there are, what they are
// (role, models, ranks, block size), and whether each can take requests.
//
// Fleet is its one type. Readers take a View, an immutable snapshot swapped
// atomically at each change; health comes from probes and from what traffic
// reports. It gives out slots and engine connections and tells listeners of
// joins and leaves; it never chooses among workers.
package fleet
