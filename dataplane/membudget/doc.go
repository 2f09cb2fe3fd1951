// Package membudget bounds what request and response bodies may take of the
// process's memory, and lends leveled buffers against that bound. It imports
// nothing of ours.
package membudget
