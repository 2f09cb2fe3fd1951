package tokenize

import "sluice/router/tokenize/chatinput"

// truncate cuts a prompt's ids, of a text of textBytes, as the server does (vLLM 0.32,
// renderers/params.py). It returns false if what the server keeps is not known.
func (n *InProcess) truncate(ids []uint32, t chatinput.Truncation, q *NativeQuery, addSpecial bool, textBytes int) ([]uint32, bool) {
	if t.Keep == 0 {
		return ids, true
	}
	shortest, longest := 0, 0
	if q.Contexts != nil {
		shortest, longest = q.Contexts.Contexts()
	}
	if t.Side != chatinput.Default && textBytes > shortest*n.longest {
		return ids, false // the server cuts so long a text before it is tokenized
	}
	keep := t.Keep
	if keep == chatinput.KeepContext {
		least := shortest
		if keep = longest; t.Output {
			least, keep = least-1, keep-1
		}
		if least <= 0 || len(ids) > least && least != keep {
			return ids, false // the engines differ, or have not said
		}
	}
	if len(ids) <= keep {
		return ids, true
	}
	switch {
	case t.Side == chatinput.Right:
		return ids[:keep], true
	case t.Side == chatinput.Left || !addSpecial:
		copy(ids, ids[len(ids)-keep:])
		return ids[:keep], true
	case n.rules == nil:
		return ids, false
	}
	first, last := len(n.rules.Prefix), len(n.rules.Suffix)
	if first+last > keep {
		return ids, false
	}
	copy(ids[first:], ids[len(ids)-(keep-first):])
	return ids[:keep], true
}
