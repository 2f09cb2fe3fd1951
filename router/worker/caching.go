package worker

// maxMissedHits is after how many hits in a row that were foretold and of which the engine
// found nothing a rank is taken for one that does not cache prompts. Requests with the
// same new beginning that come at once miss each other's blocks; so many seldom do.
const maxMissedHits = 8

// RecordCacheHit takes in how many tokens of a prompt the engine found in its cache, and how
// many were foretold. now is true when that has just shown that it caches nothing.
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

// MayCache says whether what the rank was sent may be found there again. One word of
// the engine that it found something is enough.
func (r *Rank) MayCache() bool { return r.missedHits.Load() < maxMissedHits }

// ResetCaching takes back what Found has learned: the engine is another process.
func (r *Rank) ResetCaching() { r.missedHits.Store(0) }
