package family

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
	"sluice/router/pd/reqbody"
	"sluice/router/worker"
)

// sglang is SGLang's hand-over through the prefill node's bootstrap server. The router sends both
// legs at once with the same bootstrap_host, bootstrap_port and bootstrap_room, and the decode
// engine meets the prefill engine in that room. Read in SGLang 0.4.6 … 0.5.23.
//
// If the bootstrap port of a prefill worker is unknown, the router sends the prefill leg first and
// copies the disaggregated_params of its response into the decode leg.
type sglang struct{}

// Name implements Family.
func (sglang) Name() string { return "sglang" }

// Traits implements Family. A batch has one room per prompt. An engine in decode mode cannot
// prefill.
func (sglang) Traits() Traits {
	return Traits{
		Kinds:   kindsOf(front.Chat, front.Completions, front.ResponsesAPI, front.NativeGenerate),
		Batches: true, NoDecodeOnly: true, PrefillNeedsDecode: true, NoLease: true,
	}
}

// Order implements Family.
func (sglang) Order(p *Handover) Order {
	if bootstrapPort(p.Prefill) == 0 {
		return PrefillFirst
	}
	return Concurrent
}

// Prefill implements Family. It disables streaming so that a failed transfer is an HTTP status and
// not an event. It sets no token limit, because the prefill engine stops after the first token
// itself.
func (s sglang) Prefill(leg *LegRequest, p *Handover) {
	leg.disableStream()
	leg.Remove(jsonscan.KeyDisaggPrefillDPRank)
	s.addressRank(leg, p.Prefill)
	if port := bootstrapPort(p.Prefill); port != 0 {
		s.writeBootstrap(leg, p, port)
		return
	}
	// no engine accepts a request without a room
	leg.Set(jsonscan.KeyBootstrapRoom, leg.Render(func(dst []byte) []byte { return appendBootstrapRooms(dst, p) }))
}

// Decode implements Family.
func (s sglang) Decode(leg *LegRequest, p *Handover) {
	s.addressRank(leg, p.Decode)
	if !p.Decode.VersionBefore(0, 5, 10) && dpSize(p.Prefill) > 1 {
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

// Handle implements Family. The handle is disaggregated_params with all three bootstrap members.
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

// bootstrapValue reports whether a value is valid for a bootstrap member: a string for the host, an
// integer for the others, or a list of such values for a batch.
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

// addressRank sets the data-parallel rank in the body, with the member that the engine's release
// uses. It removes a rank that the client chose, which could differ from the rank of the other leg.
func (sglang) addressRank(leg *LegRequest, r *worker.Rank) {
	key, other := jsonscan.KeyRoutedDPRank, jsonscan.KeyDataParallelRank
	if r.VersionBefore(0, 5, 10) {
		key, other = other, key
	}
	leg.Remove(other)
	if r.SendRank {
		leg.Set(key, leg.Int(uint64(r.ID.Rank)))
	} else {
		leg.Remove(key)
	}
	leg.RankInBody = r.VersionBefore(0, 5, 10)
}

// writeBootstrap sets the three bootstrap members, for a batch as lists with one room per prompt.
func (sglang) writeBootstrap(leg *LegRequest, p *Handover, port int) {
	host := p.Prefill.Option("bootstrap_host")
	if host == "" {
		host = p.Prefill.Host()
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

// appendBootstrapRooms appends the rooms of a hand-over, equal for both legs: a number, or a list
// for a batch. Every room is congruent to the prefill rank. Releases without
// disagg_prefill_dp_rank, and servers that balance by room, derive the rank that has the KV from
// the room.
func appendBootstrapRooms(dst []byte, p *Handover) []byte {
	n, ranks := countPrompts(p), uint64(dpSize(p.Prefill))
	bootstrapRoom := p.Token
	choices := reqbody.WantsSeveral(p.Doc.Raw(choicesKey(p.Kind)))
	// For several choices the server increments a single number per choice and prompt, which leads
	// to other ranks, but repeats a list.
	counts := ranks == 1 || !p.Prefill.VersionBefore(0, 5, 10)
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

// maxBootstrapRoom leaves space for the server's increments, one per choice.
const maxBootstrapRoom = 1<<63 - 1<<20

// congruentRoom returns a room near the given one with room % ranks equal to the rank.
func congruentRoom(room, ranks uint64, rank *worker.Rank) uint64 {
	room %= maxBootstrapRoom
	if ranks > 1 {
		room = room - room%ranks + uint64(rank.ID.Rank)%ranks
	}
	return room
}

// nextRandom returns the next of a sequence of 63-bit random numbers.
func nextRandom(z uint64) uint64 {
	z += 0x9E3779B97F4A7C15
	z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
	z = (z ^ (z >> 27)) * 0x94D049BB133111EB
	return (z ^ (z >> 31)) >> 1
}

// countPrompts returns the number of prompts in the request, 1 if it is not a batch.
func countPrompts(p *Handover) int {
	var list []byte
	switch p.Kind {
	case front.Completions:
		list = p.Doc.Raw(jsonscan.KeyPrompt)
	case front.NativeGenerate:
		if list = p.Doc.Raw(jsonscan.KeyText); !reqbody.IsPromptList(list) {
			list = p.Doc.Raw(jsonscan.KeyInputIDs)
		}
	}
	if !reqbody.IsPromptList(list) {
		return 1
	}
	return max(reqbody.CountElements(list), 1)
}

// bootstrapPort returns the port of the rank's bootstrap server: the configured one, else the one
// that the engine reported, else 0.
func bootstrapPort(r *worker.Rank) int {
	if port := atoi(r.Option("bootstrap_port")); port != 0 {
		return port
	}
	return r.Worker.Info().BootstrapPort
}

// dpSize returns the number of data-parallel ranks of the rank's engine.
func dpSize(r *worker.Rank) int {
	n := r.Worker.Info().DPSize
	for _, other := range r.Worker.Ranks {
		n = max(n, int(other.ID.Rank)+1)
	}
	return n
}
