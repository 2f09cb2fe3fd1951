package worker

import "slices"

// A data-parallel rank has up to two numbers. The engine counts over all of its nodes: so
// its KV events, their ports and its metrics name ranks. The server of one node takes the
// X-data-parallel-rank header counted from its own first rank, the start rank (vLLM with
// --data-parallel-hybrid-lb or --data-parallel-external-lb). ID.Rank is what the operator
// wrote, which may be either: ranks that all are at or above the start rank are the engine's.

// EngineRank is the number that the engine has for the rank.
func (r *Rank) EngineRank() int { return r.EngineRankFrom(r.startRank()) }

// EngineRankFrom is EngineRank where the engine says that its first rank here is start.
func (r *Rank) EngineRankFrom(start int) int {
	n := int(r.ID.Rank)
	switch {
	case r.Worker == nil || len(r.Worker.Spec.RankURLs) > 0: // a rank has a server of its own
		return n
	case r.Worker.Spec.StartRank > 0:
		start = r.Worker.Spec.StartRank
	}
	if GlobalRanks(r.Worker.Spec.Ranks, start) {
		return n
	}
	return start + n
}

// HeaderRank is the number that the rank's server takes in X-data-parallel-rank.
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

// GlobalRanks says whether ranks are written as an engine counts them whose first here is start.
func GlobalRanks(ranks []uint16, start int) bool {
	return len(ranks) > 0 && int(slices.Min(ranks)) >= start
}
