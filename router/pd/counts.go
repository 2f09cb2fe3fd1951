package pd

import (
	"sluice/dataplane/front"
	"sluice/dataplane/relay"
	"sluice/router/tokenize"
	"sluice/router/worker"
)

// encodedPrompt is a prompt that the router has tokenized itself.
type encodedPrompt struct {
	model  *tokenize.InProcess // nil: the ids are of another source, or of one prompt of several
	tokens int
}

func (q *request) encodedPrompt() encodedPrompt {
	if p := &q.prompt; p.Source == tokenize.FromNative && len(p.Tokens) == p.Count {
		return encodedPrompt{p.Model, p.Count}
	}
	return encodedPrompt{}
}

// compareCounts has the ids of the next prompt compared with an engine's if what the engine has reported of
// this one does not fit its ids: it has another number of tokens there or, without a prefill leg, more of them were
// cached than its KV events had reported, by a block or more. Where all fits, the ids may differ nevertheless.
func (p encodedPrompt) compareCounts(s *settings, kind front.Kind, use *relay.Usage, rank *worker.Rank, predicted int, isWhole bool) {
	if p.model == nil || use.Prompt <= 0 {
		return
	}
	size := rank.BlockSize()
	isMoreCached := isWhole && size > 0 && worker.FeedState(rank.Feed.Load()) == worker.FeedLive && use.Cached >= predicted+size
	if use.Prompt != p.tokens || isMoreCached {
		s.Tokenizer.Suspect(p.model, tokenizeKind(kind))
	}
}
