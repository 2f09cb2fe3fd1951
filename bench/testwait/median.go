package testwait

import (
	"cmp"
	"slices"
)

// Median returns the median of all: of an even number of values, the greater of the two in the middle.
// A bound on a latency or on CPU time must hold for the median of several tries: other processes make
// single tries slower, and the least of several would hide a fault that occurs in most of them.
func Median[T cmp.Ordered](all ...T) T {
	sorted := slices.Clone(all)
	slices.Sort(sorted)
	return sorted[len(sorted)/2]
}

// MedianOf returns the median of n results of measure, called one after another.
func MedianOf[T cmp.Ordered](n int, measure func() T) T {
	all := make([]T, n)
	for i := range all {
		all[i] = measure()
	}
	return Median(all...)
}
