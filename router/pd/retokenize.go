package pd

import (
	"slices"
	"time"

	"sluice/dataplane/front"
	"sluice/dataplane/upstream"
	"sluice/router/pd/migration"
	"sluice/router/worker"
)

// maxRetokenizeAnswer bounds the response of a tokenize request, in bytes.
const maxRetokenizeAnswer = 32 << 20

// retokenize finds the token ids of a stream that has only text; see migration.State.Retokenize. healthy
// says that the stream's own engine may be asked.
func (s *streamState) retokenize(client front.ClientGoneNotifier, healthy bool) (reason string) {
	rank := s.tokenizer(healthy)
	return s.migration.Retokenize(rank, slices.Contains(s.settings.Migration.Allow, "retokenized"), func(body []byte) []byte {
		return s.postTokenize(client, rank, body)
	})
}

// tokenizer returns a ready rank of the model whose engine can retokenize text, or nil. It is another one
// than the stream's unless own is set.
func (s *streamState) tokenizer(own bool) *worker.Rank {
	pool, ok := s.settings.Fleet.View().Pool(s.migration.model)
	if !ok {
		return nil
	}
	failed := s.migration.getExtra().failed
	for _, ranks := range [...][]*worker.Rank{pool.Decode, pool.Aggregated, pool.Prefill} {
		for _, r := range ranks {
			if (own || r != s.rank) && !slices.Contains(failed, r) && migration.CanRetokenize(r) {
				return r
			}
		}
	}
	return nil
}

// postTokenize posts body to a rank's /tokenize. It returns nil if the rank does not answer in time
// or answers with an error.
func (s *streamState) postTokenize(client front.ClientGoneNotifier, rank *worker.Rank, body []byte) []byte {
	opt := s.settings
	by := time.Now().Add(opt.Migration.TokenizeTimeout)
	if end := s.migration.deadline.Time(); end.Before(by) {
		by = end
	}
	var call upstream.Call
	client.OnClientGone(call.Cancel)
	defer client.OnClientGone(nil)
	resp, err := opt.Fleet.Endpoint(rank).Do(&upstream.Request{
		Method: "POST", Path: "/tokenize", Fields: s.migration.Fields(), Body: [][]byte{body}, Deadline: by,
	}, &call)
	if err != nil {
		s.addNote("tokenizing on " + rank.ID.String() + " failed: " + err.Error())
		return nil
	}
	defer resp.Release()
	answer, err := resp.ReadAll(nil, maxRetokenizeAnswer)
	if err != nil || resp.Status != 200 {
		return nil
	}
	return answer
}
