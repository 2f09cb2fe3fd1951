package pd

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/worker"
)

// sglang is SGLang's hand-over through the prefill node's bootstrap server: both
// legs go out at once with the same bootstrap_host, bootstrap_port and
// bootstrap_room; the decode engine meets the prefill engine in the room. Read
// in SGLang 0.4.6 … 0.5.23.
//
// A prefill worker whose bootstrap port nobody has told is asked first, and the
// disaggregated_params of its answer go into decode.
type sglang struct{}

// Name implements Family.
func (sglang) Name() string { return "sglang" }

// Traits implements Family: a room serves a batch (a room for each prompt), and
// an engine in decode mode cannot prefill.
func (sglang) Traits() Traits {
	return Traits{
		Kinds:   kindsOf(front.Chat, front.Completions, front.ResponsesAPI, front.NativeGenerate),
		Batches: true, NoPlainDecode: true, PrefillNeedsDecode: true, NoLease: true,
	}
}

// Order implements Family.
func (sglang) Order(p *Handover) Order {
	if bootstrapPort(p.Prefill) == 0 {
		return PrefillFirst
	}
	return Concurrent
}

// Prefill implements Family: not streamed, so that a transfer that fails is a
// status and not an event; the output's length is the engine's affair, which
// stops after the first token.
func (s sglang) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.Remove(jsonscan.KeyDisaggPrefillDPRank)
	s.addressRank(leg, p.Prefill)
	if port := bootstrapPort(p.Prefill); port != 0 {
		s.writeBootstrap(leg, p, port)
		return
	}
	// No engine accepts a request without a room.
	leg.Set(jsonscan.KeyBootstrapRoom, leg.Render(func(dst []byte) []byte { return appendBootstrapRooms(dst, p) }))
}

// Decode implements Family.
func (s sglang) Decode(leg *LegRequest, p *Handover) {
	s.addressRank(leg, p.Decode)
	if !versionBefore(p.Decode, 0, 5, 10) && dpSize(p.Prefill) > 1 {
		leg.Set(jsonscan.KeyDisaggPrefillDPRank, leg.Int(uint64(p.Prefill.ID.Rank)))
	} else {
		leg.Remove(jsonscan.KeyDisaggPrefillDPRank)
	}
	if p.Handle == nil {
		s.writeBootstrap(leg, p, bootstrapPort(p.Prefill))
		return
	}
	for _, m := range bootstrapMembers {
		v, _, _ := jsonscan.Find(p.Handle, m.name)
		leg.Set(m.key, p.Handle[v.Start:v.End])
	}
}

var bootstrapMembers = [...]struct {
	name string
	key  jsonscan.Key
}{
	{"bootstrap_host", jsonscan.KeyBootstrapHost},
	{"bootstrap_port", jsonscan.KeyBootstrapPort},
	{"bootstrap_room", jsonscan.KeyBootstrapRoom},
}

// Handle implements Family: disaggregated_params with all three members.
func (sglang) Handle(_ *Handover, body []byte) ([]byte, error) {
	v, ok, err := jsonscan.Find(body, "disaggregated_params")
	if err != nil {
		return nil, fmt.Errorf("%w: the prefill response is not JSON: %w", ErrIncompleteHandle, err)
	}
	if !ok || v.Kind != jsonscan.Object {
		return nil, fmt.Errorf("%w: disaggregated_params is missing or null", ErrIncompleteHandle)
	}
	handle := body[v.Start:v.End]
	for _, m := range bootstrapMembers {
		v, ok, err := jsonscan.Find(handle, m.name)
		if err != nil || !ok || v.Kind <= jsonscan.Null {
			return nil, fmt.Errorf("%w: %s is missing or null", ErrIncompleteHandle, m.name)
		}
		if raw := handle[v.Start:v.End]; !bootstrapValue(m.key, v.Kind, raw) {
			return nil, fmt.Errorf("%w: %s is %.64s, want a string for the host and integers for port and room, or lists of them", ErrIncompleteHandle, m.name, raw)
		}
	}
	return handle, nil
}

// bootstrapValue says whether an engine takes a value for a bootstrap member: a string for the
// host and an integer for the others, or a list of such for a batch.
func bootstrapValue(key jsonscan.Key, kind jsonscan.Kind, raw []byte) bool {
	if kind == jsonscan.Array {
		it, n := jsonscan.Walk(raw), 0
		for ; it.Next(); n++ {
			if it.Value.Kind == jsonscan.Array || !bootstrapValue(key, it.Value.Kind, it.Raw()) {
				return false
			}
		}
		return n > 0
	}
	if key == jsonscan.KeyBootstrapHost {
		return kind == jsonscan.String && len(raw) > len(`""`)
	}
	_, ok := integer(kind, raw)
	return ok
}

// addressRank names the rank in the body, in the words of the engine's release. A
// client's own choice is taken out: it would send the legs apart.
func (sglang) addressRank(leg *LegRequest, r *worker.Rank) {
	key, other := jsonscan.KeyRoutedDPRank, jsonscan.KeyDataParallelRank
	if versionBefore(r, 0, 5, 10) {
		key, other = other, key
	}
	leg.Remove(other)
	if r.SendRank {
		leg.Set(key, leg.Int(uint64(r.ID.Rank)))
	} else {
		leg.Remove(key)
	}
	leg.RankInBody = versionBefore(r, 0, 5, 10)
}

// writeBootstrap writes where the legs meet: for a batch as lists, one room a prompt.
func (sglang) writeBootstrap(leg *LegRequest, p *Handover, port int) {
	host := workerOption(p.Prefill, "bootstrap_host")
	if host == "" {
		host = hostOf(p.Prefill)
	}
	n := countPrompts(p)
	quoted, number := leg.Quote(host), leg.Int(uint64(port))
	if n > 1 {
		quoted = leg.Render(func(dst []byte) []byte { return appendRepeated(dst, quoted, n) })
		number = leg.Render(func(dst []byte) []byte { return appendRepeated(dst, number, n) })
	}
	leg.Set(jsonscan.KeyBootstrapHost, quoted)
	leg.Set(jsonscan.KeyBootstrapPort, number)
	leg.Set(jsonscan.KeyBootstrapRoom, leg.Render(func(dst []byte) []byte { return appendBootstrapRooms(dst, p) }))
}

func appendRepeated(dst, value []byte, n int) []byte {
	dst = append(dst, '[')
	for i := range n {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, value...)
	}
	return append(dst, ']')
}

// appendBootstrapRooms writes the rooms of a pair, the same for both of its legs: a
// number, or for a batch a list. Every one is congruent to the prefill rank,
// which is where a release without disagg_prefill_dp_rank, and a server that
// balances by room, look for the KV.
func appendBootstrapRooms(dst []byte, p *Handover) []byte {
	n, ranks := countPrompts(p), uint64(dpSize(p.Prefill))
	bootstrapRoom := p.Token
	choices := wantsSeveral(p.Doc.Raw(choicesKey(p.Kind)))
	// The server counts a number up by one for each choice of each prompt, away from
	// the rank; a list it repeats.
	counts := ranks == 1 || !versionBefore(p.Prefill, 0, 5, 10)
	switch {
	case choices && counts, n == 1 && !choices:
		return appendUint(dst, congruentRoom(bootstrapRoom, ranks, p.Prefill))
	case n == 1:
		return append(appendUint(append(dst, '['), congruentRoom(bootstrapRoom, ranks, p.Prefill)), ']')
	}
	dst = append(dst, '[')
	for i := range n {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = appendUint(dst, congruentRoom(bootstrapRoom, ranks, p.Prefill))
		bootstrapRoom = nextRandom(bootstrapRoom)
	}
	return append(dst, ']')
}

func choicesKey(k front.Kind) jsonscan.Key {
	if k == front.NativeGenerate {
		return jsonscan.KeySamplingN
	}
	return jsonscan.KeyN
}

// maxBootstrapRoom keeps room for what a server adds to a room: one for each choice.
const maxBootstrapRoom = 1<<63 - 1<<20

// congruentRoom is the room near r with room % ranks equal to the rank.
func congruentRoom(room, ranks uint64, rank *worker.Rank) uint64 {
	room %= maxBootstrapRoom
	if ranks > 1 {
		room = room - room%ranks + uint64(rank.ID.Rank)%ranks
	}
	return room
}

// nextRandom gives the next of a sequence of random numbers in 63 bits.
func nextRandom(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return (z ^ (z >> 31)) >> 1
}

// countPrompts is how many prompts the request holds, 1 for what is no batch.
func countPrompts(p *Handover) int {
	var list []byte
	switch p.Kind {
	case front.Completions:
		list = p.Doc.Raw(jsonscan.KeyPrompt)
	case front.NativeGenerate:
		if list = p.Doc.Raw(jsonscan.KeyText); !isPromptList(list) {
			list = p.Doc.Raw(jsonscan.KeyInputIDs)
		}
	}
	if !isPromptList(list) {
		return 1
	}
	return max(countElements(list), 1)
}

// bootstrapPort is the port of the rank's bootstrap server: as configured, else
// as the engine told; 0 when nobody has.
func bootstrapPort(r *worker.Rank) int {
	if port := atoi(workerOption(r, "bootstrap_port")); port != 0 {
		return port
	}
	return r.Worker.Info().BootstrapPort
}

// dpSize is how many data-parallel ranks the rank's engine has.
func dpSize(r *worker.Rank) int {
	n := r.Worker.Info().DPSize
	for _, other := range r.Worker.Ranks {
		n = max(n, int(other.ID.Rank)+1)
	}
	return n
}
