package engineapi

import (
	"fmt"
	"slices"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/router/pd"
)

// media parses mm_routing_info, which identifies the media behind placeholder tokens, so that
// prompts with different images do not look alike. block_mm_infos contains, for each block of
// block_size routing tokens (default: the pool's block size), null or
// {"mm_objects":[{"mm_hash":u64 or text, "offsets": [[from, to], …]}]}. Offsets count from the
// beginning of the block. A medium that continues in the next block appears there again with
// its own offsets, or once with offsets beyond the block.
//
// A textual mm_hash is assumed to be the engine's own identifier. Events contain it, so the
// look-up finds the blocks that engines hold. No event contains a numeric mm_hash: it only
// distinguishes blocks from each other.
func (r *request) media(blockSize int) error {
	if !r.has(fMMRouting) {
		return nil
	}
	h := &r.hints
	if r.has(fRoutingTokens) {
		var err error
		if h.Tokens, err = jsonscan.TokenIDs(nil, r.vals[fRoutingTokens]); err != nil {
			return &FieldError{Field: "mm_routing_info.routing_token_ids", Got: err.Error(), Want: rules[fRoutingTokens].want}
		}
	}
	if n := r.count(fExpandedLen); n > 0 && len(h.Tokens) > 0 {
		if n > len(h.Tokens) {
			return &FieldError{Field: "mm_routing_info.expanded_prompt_len", Got: strconv.Itoa(n), Want: fmt.Sprintf("at most %d, the number of routing_token_ids", len(h.Tokens))}
		}
		h.Tokens = h.Tokens[:n]
	}
	if !r.has(fBlockInfos) {
		return nil
	}
	tokens := len(h.Tokens)
	if tokens == 0 {
		tokens = len(r.tokens)
	}
	size := r.count(fMMBlockSize)
	if size == 0 {
		size = blockSize
	}
	if size == 0 {
		return &FieldError{Field: "mm_routing_info.block_size", Got: "nothing, and no engine has reported its block size yet", Want: rules[fMMBlockSize].want}
	}
	blocks := mediaBlocks{size: size, ends: make(map[pd.Medium]int)}
	for it := jsonscan.Walk(r.vals[fBlockInfos]); it.Next(); blocks.index++ {
		if it.Value.Kind == jsonscan.Null {
			continue
		}
		if err := blocks.add(it.Raw(), it.Value.Kind); err != nil {
			return err
		}
		if len(blocks.media) > maxMedia {
			return &FieldError{Field: "mm_routing_info.block_mm_infos", Got: fmt.Sprintf("more than %d media", maxMedia), Want: "no more"}
		}
	}
	h.Media = blocks.media
	slices.SortStableFunc(h.Media, func(a, b pd.Medium) int { return a.From - b.From })
	marked := 0
	for i := range h.Media {
		m := &h.Media[i]
		marked += (min(m.To, tokens)-min(m.From, tokens))/size + 2
	}
	if marked > 2*tokens+2*maxMedia { // a medium has at least one token of its own
		return &FieldError{Field: "mm_routing_info.block_mm_infos", Got: fmt.Sprintf("media in %d places", marked), Want: fmt.Sprintf("no more than a prompt of %d tokens has room for", tokens)}
	}
	return nil
}

// mediaBlocks parses the entries of block_mm_infos, one block after another. Its errors are of type
// *FieldError and name the block.
type mediaBlocks struct {
	size  int // tokens per block
	index int // of the current block
	media []pd.Medium
	ends  map[pd.Medium]int // see mergeMedium
}

const wantBlockMedia = `null or {"mm_objects":[{"mm_hash":…,"offsets":[[from,to]]}]}`

// add adds the media of the current block.
func (b *mediaBlocks) add(raw []byte, kind jsonscan.Kind) error {
	list, ok, err := jsonscan.Find(raw, "mm_objects")
	if err != nil || !ok || list.Kind != jsonscan.Array {
		return b.invalid(raw, kind, wantBlockMedia)
	}
	for o := jsonscan.Walk(raw[list.Start:list.End]); o.Next(); {
		if err := b.addObject(o.Raw(), o.Value.Kind); err != nil {
			return err
		}
	}
	return nil
}

// addObject adds a medium at each of its offsets. A medium without offsets fills the block.
func (b *mediaBlocks) addObject(raw []byte, kind jsonscan.Kind) error {
	m := pd.Medium{}
	hash, ok, err := jsonscan.Find(raw, "mm_hash")
	if err != nil || !ok {
		return b.invalid(raw, kind, wantBlockMedia)
	}
	switch text := raw[hash.Start:hash.End]; {
	case hash.Kind == jsonscan.String:
		m.Key = string(appendText(nil, text))
	case unsigned(text, hash.Kind):
		m.Hash, _ = strconv.ParseUint(string(text), 10, 64)
		m.HashOnly = true
	default:
		return b.invalid(raw, kind, wantBlockMedia)
	}
	offsets, ok, err := jsonscan.Find(raw, "offsets")
	if err != nil || !ok || offsets.Kind != jsonscan.Array {
		return b.invalid(raw, kind, wantBlockMedia)
	}
	start, hasOffsets := b.index*b.size, false
	for p := jsonscan.Walk(raw[offsets.Start:offsets.End]); p.Next(); {
		hasOffsets = true
		from, to, ok := parseOffsets(p.Raw())
		if !ok {
			return b.invalid(p.Raw(), p.Value.Kind, "offsets of the form [from, to]")
		}
		m.From, m.To = start+from, start+to
		b.media = mergeMedium(b.media, b.ends, m)
	}
	if !hasOffsets {
		m.From, m.To = start, start+b.size
		b.media = mergeMedium(b.media, b.ends, m)
	}
	return nil
}

// parseOffsets parses [from, to], two token counts of at most 1<<24 in ascending order.
func parseOffsets(raw []byte) (from, to int, ok bool) {
	var at [2]int
	n := 0
	for v := jsonscan.Walk(raw); v.Next(); n++ {
		x, err := strconv.Atoi(string(v.Raw()))
		if err != nil || n > 1 || x < 0 || x > 1<<24 {
			return 0, 0, false
		}
		at[n] = x
	}
	return at[0], at[1], n == 2 && at[0] <= at[1]
}

func (b *mediaBlocks) invalid(raw []byte, kind jsonscan.Kind, want string) error {
	return &FieldError{Field: fmt.Sprintf("mm_routing_info.block_mm_infos[%d]", b.index), Got: quoteValue(raw, kind), Want: want}
}

// maxMedia is the maximum number of media in one prompt.
const maxMedia = 4096

// mergeMedium adds m to all, merged with the medium that it continues, if any. ends maps each
// medium, without its From, to its index in all.
func mergeMedium(all []pd.Medium, ends map[pd.Medium]int, m pd.Medium) []pd.Medium {
	end := m
	end.From, end.To = 0, m.From
	i, goesOn := ends[end]
	if goesOn {
		delete(ends, end)
		all[i].To = m.To
	} else {
		i = len(all)
		all = append(all, m)
	}
	end.To = m.To
	ends[end] = i
	return all
}
