// Package patrol looks at many things at an interval, with one timer for them all.
//
// Its main type is Patrol. A request that would need a timer of its own, for what
// hardly ever happens, joins one instead (router/pd's vigil, router/kvtransfer'
// stalls): going on duty and off it is then a store in the thing itself, where a
// timer's reset and stop cost half a microsecond and may wake a thread. It decides
// nothing and keeps nothing alive.
package sweeper
