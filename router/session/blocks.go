package session

import (
	"time"

	"sluice/router/blockhash"
)

const (
	// markBlocks is the distance between the blocks of a prompt by which sessions are compared. A
	// sequence hash stands for all blocks before it, so two sessions share exactly the blocks up to
	// the first mark in which they differ, give or take markBlocks.
	markBlocks = 16
	// maxMarks bounds the marks of all sessions together; beyond it sessions have none, and what
	// they share is unknown.
	maxMarks = 1 << 20
	// maxKeys bounds the blocks of all sessions whose hashes are kept for the approximate index. A
	// session beyond it leaves its predictions to their time to live.
	maxKeys = 1 << 21
)

// blockUse counts how many sessions use a block, by the marks.
type blockUse struct {
	count map[blockhash.Seq]int32
}

func (b *blockUse) add(m blockhash.Seq) {
	if b.count == nil {
		b.count = make(map[blockhash.Seq]int32)
	}
	b.count[m]++
}

func (b *blockUse) full() bool { return len(b.count) >= maxMarks }

func (b *blockUse) release(marks []blockhash.Seq) {
	for _, m := range marks {
		if n := b.count[m] - 1; n > 0 {
			b.count[m] = n
		} else {
			delete(b.count, m)
		}
	}
}

// shared returns how many of a session's marks another session has. The session itself has been
// released.
func (b *blockUse) shared(marks []blockhash.Seq) (n int) {
	for n < len(marks) && b.count[marks[n]] > 0 {
		n++
	}
	return n
}

// Observe notes the prompt of a turn: its blocks of blockTokens tokens each, none if they are
// unknown, and its length in tokens. keep says that the approximate index predicts the blocks.
func (t *Table) Observe(u *Turn, blocks []blockhash.Seq, blockTokens, tokens int, keep bool) {
	s := u.session
	if s == nil {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if s.gone {
		return
	}
	same := 0
	for same < len(s.marks) && same*markBlocks < len(blocks) && s.marks[same] == blocks[same*markBlocks] {
		same++
	}
	if same == 0 && tokens < s.tokens/2 {
		u.minor = true
		return
	}
	if s.turns > 1 && same > 0 {
		u.expected = int32(min(same*markBlocks*blockTokens, tokens, max(s.tokens, 0)))
	}
	t.blocks.release(s.marks[same:])
	s.marks = s.marks[:same]
	for at := same * markBlocks; at < len(blocks) && !t.blocks.full(); at += markBlocks {
		t.blocks.add(blocks[at])
		s.marks = append(s.marks, blocks[at])
	}
	t.keepKeys(s, blocks, same*markBlocks, keep)
	inUse := 0
	for inUse < len(s.marks) && t.blocks.count[s.marks[inUse]] > 1 {
		inUse++
	}
	s.shared = min(inUse*markBlocks*blockTokens, tokens)
	s.tokens, s.blocks = tokens, len(blocks)
	t.recount(s, 0)
}

// keepKeys keeps the hashes of a prompt's blocks, the first same of which are those of the session's
// last prompt.
func (t *Table) keepKeys(s *Session, blocks []blockhash.Seq, same int, keep bool) {
	if !keep || t.keys-len(s.keys)+len(blocks) > maxKeys {
		t.dropKeys(s)
		return
	}
	same = min(same, len(s.keys), len(blocks))
	t.keys += len(blocks) - len(s.keys)
	s.keys = append(s.keys[:same], blocks[same:]...)
}

func (t *Table) dropKeys(s *Session) {
	t.keys -= len(s.keys)
	s.keys = nil
}

// learn takes the end of a turn as evidence: whether the KV that the session had left was still
// there.
func (t *Table) learn(s *Session, u *Turn, res Result, now time.Time) {
	held := s.active && !s.cachedIn.IsZero()
	s.cachedIn = now
	if s.pool != nil && res.Cached >= 0 {
		s.pool.work += int64(max(res.Prompt-res.Cached, 0))
	}
	if u.minor || u.expected <= 0 || res.Cached < 0 || !held || s.pool == nil {
		return
	}
	s.pool.observe(t, int64(u.expected), int64(min(res.Cached, int(u.expected))), now)
}
