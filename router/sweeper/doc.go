// Package sweeper checks many objects at an interval, with one timer for all.
//
// The main type is Sweeper. A request that would need its own timer for a rare event joins one
// instead (router/pd's engine-down monitor, router/kvtransfer's stalls): becoming active and
// inactive is then a store in the object, whereas resetting and stopping a timer costs half a
// microsecond and may wake a thread. The package decides nothing and keeps no object alive.
package sweeper
