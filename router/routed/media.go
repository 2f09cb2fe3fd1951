package routed

import (
	"fmt"
	"slices"
	"strconv"

	"sluice/dataplane/jsonscan"
	"sluice/router/disagg"
)

// media reads mm_routing_info: what stands in the prompt where placeholders make
// two images look alike. block_mm_infos has, for each block of block_size
// routing tokens (where that is not said, of the pool's own), null or {"mm_objects":[{"mm_hash":u64 or text, "offsets":
// [[from, to], …]}]}, offsets counted from the block's beginning; a medium that
// goes on in the next block stands there again with offsets of its own, or once
// with offsets that go beyond the block.
//
// An mm_hash that is text is taken for the engine's own identifier, which its
// events carry, so the look-up finds what engines hold. A number is a hash that
// no event carries: such blocks are only told apart.
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
	tokens := len(h.Tokens)
	if tokens == 0 {
		tokens = len(r.tokens)
	}
	if most := r.count(fExpandedLen); r.has(fExpandedLen) && r.has(fRoutingTokens) && most != tokens {
		return &FieldError{Field: "mm_routing_info.expanded_prompt_len", Got: strconv.Itoa(most), Want: fmt.Sprintf("%d, the number of routing_token_ids", tokens)}
	}
	if !r.has(fBlockInfos) {
		return nil
	}
	size := r.count(fMMBlockSize)
	if size == 0 {
		size = blockSize
	}
	if size == 0 {
		return &FieldError{Field: "mm_routing_info.block_size", Got: "nothing, and no engine has told its block size yet", Want: rules[fMMBlockSize].want}
	}
	bad := func(i int, raw []byte, kind jsonscan.Kind, want string) error {
		return &FieldError{Field: fmt.Sprintf("mm_routing_info.block_mm_infos[%d]", i), Got: shown(raw, kind), Want: want}
	}
	const want = `null or {"mm_objects":[{"mm_hash":…,"offsets":[[from,to]]}]}`
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
			m := disagg.Medium{}
			hash, ok, err := jsonscan.Find(o.Raw(), "mm_hash")
			if err != nil || !ok {
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			switch raw := o.Raw()[hash.Start:hash.End]; {
			case hash.Kind == jsonscan.String:
				m.Key = string(appendText(nil, raw))
			case unsigned(raw, hash.Kind):
				m.Hash, _ = strconv.ParseUint(string(raw), 10, 64)
				m.Numbered = true
			default:
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			offsets, ok, err := jsonscan.Find(o.Raw(), "offsets")
			if err != nil || !ok || offsets.Kind != jsonscan.Array {
				return bad(i, o.Raw(), o.Value.Kind, want)
			}
			for p := jsonscan.Walk(o.Raw()[offsets.Start:offsets.End]); p.Next(); {
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
				h.Media = joinMedium(h.Media, m)
			}
		}
	}
	slices.SortStableFunc(h.Media, func(a, b disagg.Medium) int { return a.From - b.From })
	return nil
}

// joinMedium adds m, to the one it goes on from where there is one.
func joinMedium(all []disagg.Medium, m disagg.Medium) []disagg.Medium {
	for i := range all {
		o := &all[i]
		if o.Key == m.Key && o.Hash == m.Hash && o.Numbered == m.Numbered && o.To == m.From {
			o.To = m.To
			return all
		}
	}
	return append(all, m)
}
