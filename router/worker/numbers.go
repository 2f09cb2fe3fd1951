package worker

import "slices"

// A data-parallel rank has up to two numbers. The engine counts over all of its nodes; its KV
// events, their ports and its metrics use these numbers. The server of one node accepts an
// X-data-parallel-rank header that counts from the node's first rank, the start rank (vLLM with
// --data-parallel-hybrid-lb or --data-parallel-external-lb). ID.Rank is the number that the
// operator has configured, which may be either: if all ranks are at or above the start rank they
// are the engine's numbers.

// EngineRank returns the engine's number of the rank.
func (r *Rank) EngineRank() int { return r.EngineRankFrom(r.startRank()) }

// EngineRankFrom is EngineRank for an engine whose first rank here is start.
func (r *Rank) EngineRankFrom(start int) int {
	n := int(r.ID.Rank)
	switch {
	case r.Worker == nil || len(r.Worker.Spec.RankURLs) > 0: // each rank has its own server
		return n
	case r.Worker.Spec.StartRank > 0:
		start = r.Worker.Spec.StartRank
	}
	if GlobalRanks(r.Worker.Spec.Ranks, start) {
		return n
	}
	return start + n
}

// HeaderRank returns the number that the rank's server accepts in X-data-parallel-rank.
func (r *Rank) HeaderRank() int { return r.EngineRank() - r.startRank() }

func (r *Rank) startRank() int {
	switch {
	case r.Worker == nil || len(r.Worker.Spec.RankURLs) > 0:
		return 0
	case r.Worker.Spec.StartRank > 0:
		return r.Worker.Spec.StartRank
	}
	return r.Worker.Info().StartRank
}

// GlobalRanks reports whether ranks are the engine's numbers, given its first rank here.
func GlobalRanks(ranks []uint16, start int) bool {
	return len(ranks) > 0 && int(slices.Min(ranks)) >= start
}
