package worker

// maxMissedHits is the number of consecutive predicted hits, of which the engine found nothing,
// after which a rank counts as one without prefix caching. Simultaneous requests with the same new
// prefix miss each other's blocks, but seldom that many.
const maxMissedHits = 8

// RecordCacheHit records how many tokens of a prompt the engine found in its cache and how many
// were predicted. stopped is true when this call has shown that the engine caches nothing.
func (r *Rank) RecordCacheHit(predicted, cached int) (stopped bool) {
	switch {
	case cached > 0:
		if r.missedHits.Load() != 0 {
			r.missedHits.Store(0)
		}
	case cached == 0 && predicted > 0:
		return r.missedHits.Add(1) == maxMissedHits
	}
	return false
}

// MayCache reports whether prompts that were sent to the rank may be cached there. One reported hit
// is enough.
func (r *Rank) MayCache() bool { return r.missedHits.Load() < maxMissedHits }

// ResetCaching discards what RecordCacheHit has learned: the engine is another process.
func (r *Rank) ResetCaching() { r.missedHits.Store(0) }
