package worker

// vainHits is after how many hits in a row that were foretold and of which the engine
// found nothing a rank is taken for one that does not cache prompts. Requests with the
// same new beginning that come at once miss each other's blocks; so many seldom do.
const vainHits = 8

// Found takes in how many tokens of a prompt the engine found in its cache, and how
// many were foretold. now is true when that has just shown that it caches nothing.
func (r *Rank) Found(predicted, cached int) (now bool) {
	switch {
	case cached > 0:
		if r.vain.Load() != 0 {
			r.vain.Store(0)
		}
	case cached == 0 && predicted > 0:
		return r.vain.Add(1) == vainHits
	}
	return false
}

// Caches says whether what the rank was sent may be found there again. One word of
// the engine that it found something is enough.
func (r *Rank) Caches() bool { return r.vain.Load() < vainHits }

// ForgetCaching takes back what Found has learned: the engine is another process.
func (r *Rank) ForgetCaching() { r.vain.Store(0) }
