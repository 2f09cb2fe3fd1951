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
	bad := func(i int, raw []byte, kind jsonscan.Kind, want string) error {
		return &FieldError{Field: fmt.Sprintf("mm_routing_info.block_mm_infos[%d]", i), Got: quoteValue(raw, kind), Want: want}
	}
	const want = `null or {"mm_objects":[{"mm_hash":…,"offsets":[[from,to]]}]}`
	ends := make(map[pd.Medium]int)
	i := -1
	for it := jsonscan.Walk(r.vals[fBlockInfos]); it.Next(); {
		i++
		if it.Value.Kind == jsonscan.Null {
			continue
		}
		list, ok, err := jsonscan.Find(it.Raw(), "mm_objects")
		if err != nil || !ok || list.Kind != jsonscan.Array {
			return bad(i, it.Raw(), it.Value.Kind, want)
		}
		for o := jsonscan.Walk(it.Raw()[list.Start:list.End]); o.Next(); {
			m := pd.Medium{}
			hash, ok, err := jsonscan.Find(o.Raw(), "mm_hash")
			if err != nil || !ok {
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			switch raw := o.Raw()[hash.Start:hash.End]; {
			case hash.Kind == jsonscan.String:
				m.Key = string(appendText(nil, raw))
			case unsigned(raw, hash.Kind):
				m.Hash, _ = strconv.ParseUint(string(raw), 10, 64)
				m.HashOnly = true
			default:
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			offsets, ok, err := jsonscan.Find(o.Raw(), "offsets")
			if err != nil || !ok || offsets.Kind != jsonscan.Array {
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			somewhere := true
			for p := jsonscan.Walk(o.Raw()[offsets.Start:offsets.End]); p.Next(); {
				somewhere = false
				var at [2]int
				n := 0
				for v := jsonscan.Walk(p.Raw()); v.Next(); n++ {
					x, err := strconv.Atoi(string(v.Raw()))
					if err != nil || n > 1 || x < 0 || x > 1<<24 {
						return bad(i, p.Raw(), p.Value.Kind, "offsets of the form [from, to]")
					}
					at[n] = i*size + x
				}
				if n != 2 || at[1] < at[0] {
					return bad(i, p.Raw(), p.Value.Kind, "offsets of the form [from, to]")
				}
				m.From, m.To = at[0], at[1]
				h.Media = mergeMedium(h.Media, ends, m)
			}
			if somewhere {
				m.From, m.To = i*size, (i+1)*size
				h.Media = mergeMedium(h.Media, ends, m)
			}
		}
		if len(h.Media) > maxMedia {
			return &FieldError{Field: "mm_routing_info.block_mm_infos", Got: fmt.Sprintf("more than %d media", maxMedia), Want: "no more"}
		}
	}
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
