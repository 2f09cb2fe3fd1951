package session

import (
	"container/list"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"time"

	"sluice/router/blockhash"
	"sluice/router/schedule"
	"sluice/router/worker"
)

// Options of a Table. A zero value means the default in brackets.
type Options struct {
	Max        int           // sessions that the table holds [65536]
	Expire     time.Duration // a session that is not used for this long is forgotten [30m]
	UserMember bool          // the body's member user names a session too, see FromBody
	// LimitActive limits how many sessions are active while the sessions in use need more KV than
	// there is.
	LimitActive bool
	Hold        time.Duration // how long an active session keeps its place between its turns at most [30s]
	MaxWait     time.Duration // how long a turn waits at most until its session may be active [30s]
}

func (o Options) withDefaults() Options {
	if o.Max <= 0 {
		o.Max = 1 << 16
	}
	for _, d := range [...]struct{ at, value *time.Duration }{{&o.Expire, ptr(30 * time.Minute)}, {&o.Hold, ptr(30 * time.Second)}, {&o.MaxWait, ptr(30 * time.Second)}} {
		if *d.at <= 0 {
			*d.at = *d.value
		}
	}
	return o
}

func ptr(d time.Duration) *time.Duration { return &d }

// Key identifies a session: 128 bits of a salted SHA-256 of its tenant and its id. The zero Key
// identifies none.
type Key [2]uint64

// IsZero reports whether k identifies no session.
func (k Key) IsZero() bool { return k == Key{} }

// Short returns 32 bits of the key, by which explain records and the admin API name the session; never
// 0.
func (k Key) Short() uint32 { return uint32(k[0]) }

// String returns Short in hexadecimal.
func (k Key) String() string { return fmt.Sprintf("%08x", k.Short()) }

// Table holds the sessions of a router. All methods may be called from any goroutine.
type Table struct {
	salt [16]byte // of this process, so that nobody can make two ids collide, or guess one from its Key

	mu      sync.Mutex
	opt     Options
	byKey   map[Key]*Session
	ages    list.List          // of *Session, the least recently used first
	tenants map[string]*tenant // those with sessions
	blocks  blockUse
	keys    int // number of blocks in all Session.keys
	pools   map[string]*pool
	order   uint64 // of the last session that began
	timer   *time.Timer
	counts  Counts
	// draining: no session is limited any more, because the next turns go to another process.
	draining bool
}

// tenant is the sessions of one tenant: an API key, or what a trusted client names.
type tenant struct {
	name   string
	ages   list.List // of *Session, the least recently used first
	active int       // sessions that are active
}

// Session is one session. Its Table guards it.
type Session struct {
	key    Key
	tenant *tenant
	age    *list.Element // in Table.ages
	own    *list.Element // in tenant.ages
	order  uint64        // sessions that began earlier have smaller numbers
	gone   bool          // it is not in the table any more

	turns   int
	running int       // turns in progress
	final   bool      // it ends with the last turn in progress
	seen    time.Time // the last beginning or end of a turn

	// ranks took the last turn, by leg; nil: none did, or the session has no affinity.
	ranks [3]*worker.Rank
	// The prompt of the last turn.
	tokens   int // with its output
	blocks   int // of the prompt, 0 if unknown
	shared   int // of these, those whose blocks other sessions use too
	marks    []blockhash.Seq
	keys     []blockhash.Seq // all blocks, if the approximate index predicts them
	cachedIn time.Time       // when its KV was last known to be in use

	limited
}

// Counts counts what has happened to sessions.
type Counts struct {
	Requests                   [NumOrigins]uint64 // recognised, by origin
	Finished, Expired, Evicted uint64
	Waits                      [NumWaits]uint64 // turns that waited, by how the wait ended
}

// NewTable returns an empty Table.
func NewTable(opt Options) *Table {
	t := &Table{opt: opt.withDefaults(), byKey: make(map[Key]*Session), tenants: make(map[string]*tenant), pools: make(map[string]*pool)}
	_, _ = rand.Read(t.salt[:]) // crypto/rand.Read never returns an error
	return t
}

// SetOptions changes the options. Sessions above a smaller Max are forgotten, and nobody waits any
// longer for a limit that is off.
func (t *Table) SetOptions(opt Options) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.opt = opt.withDefaults()
	for t.ages.Len() > t.opt.Max {
		t.evict(nil)
	}
	if !t.opt.LimitActive {
		t.endLimits()
	}
}

// Drain ends the limits for good, and with them all waits: the sessions whose places are held send their
// next turns to another router.
func (t *Table) Drain() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.draining = true
	t.endLimits()
}

func (t *Table) endLimits() {
	for _, p := range t.pools {
		p.limit = 0
		t.admit(p)
	}
	t.arm(time.Now())
}

// KeyOf returns the Key of a tenant's session.
func (t *Table) KeyOf(tenant string, id []byte) Key {
	var buf [512]byte // on the stack, unless the tenant's name is very long
	b := append(buf[:0], t.salt[:]...)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(tenant)))
	b = append(append(b, tenant...), id...)
	sum := sha256.Sum256(b)
	return Key{binary.BigEndian.Uint64(sum[:]) | 1, binary.BigEndian.Uint64(sum[8:])}
}

// IsOf reports whether the Table has the session of a Key, and it is the tenant's.
func (t *Table) IsOf(k Key, tenantName string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.byKey[k]
	return s != nil && s.tenant.name == tenantName
}

// Turn is one request of a session, from Begin to End. The zero Turn is one without session.
type Turn struct {
	session *Session
	// expected are the tokens of the prompt that its rank has, if nothing was evicted since the
	// session's last turn; -1 if that says nothing.
	expected int32
	// minor: the prompt is not the session's, such as one that asks for a title; it says nothing of
	// the session's KV.
	minor bool
	final bool // the client said that it is the last one
}

// IsSession reports whether the turn belongs to a session.
func (u *Turn) IsSession() bool { return u.session != nil }

// Key returns the key of the turn's session, the zero Key if there is none.
func (u *Turn) Key() Key {
	if u.session == nil {
		return Key{}
	}
	return u.session.key
}

// Begin notes that a request of a session begins. End must follow. final says that the client has
// marked the request as the session's last.
func (t *Table) Begin(k Key, tenantName string, from Origin, final bool) Turn {
	if k.IsZero() {
		return Turn{}
	}
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	t.expire(now)
	t.counts.Requests[from%NumOrigins]++
	s := t.byKey[k]
	if s == nil {
		s = t.add(k, tenantName)
	}
	s.turns++
	s.running++
	s.final = false
	t.touch(s, now)
	return Turn{session: s, expected: -1, final: final}
}

func (t *Table) add(k Key, tenantName string) *Session {
	for t.ages.Len() >= t.opt.Max {
		t.evict(t.tenants[tenantName])
	}
	owner := t.tenants[tenantName]
	if owner == nil {
		owner = &tenant{name: tenantName}
		t.tenants[tenantName] = owner
	}
	t.order++
	s := &Session{key: k, tenant: owner, order: t.order}
	s.age, s.own = t.ages.PushBack(s), owner.ages.PushBack(s)
	t.byKey[k] = s
	return s
}

func (t *Table) touch(s *Session, now time.Time) {
	s.seen = now
	if !s.gone {
		t.ages.MoveToBack(s.age)
		s.tenant.ages.MoveToBack(s.own)
	}
}

// evict forgets a session to make space for one of a tenant, which may be nil: the tenant's own least
// recently used one if it has its equal share of the table, else that of the tenant with the most. A
// tenant thus cannot displace the sessions of others by naming many.
func (t *Table) evict(owner *tenant) {
	victim, others := owner, len(t.tenants)
	if owner == nil {
		others++
	}
	if victim == nil || victim.ages.Len() < max(t.opt.Max/others, 1) {
		for _, o := range t.tenants {
			if victim == nil || o.ages.Len() > victim.ages.Len() {
				victim = o
			}
		}
	}
	t.counts.Evicted++
	t.remove(victim.ages.Front().Value.(*Session))
}

// expireStep bounds how many sessions are forgotten by one call.
const expireStep = 64

func (t *Table) expire(now time.Time) {
	for range expireStep {
		e := t.ages.Front()
		if e == nil {
			return
		}
		s := e.Value.(*Session)
		if now.Sub(s.seen) < t.opt.Expire {
			return
		}
		if s.running > 0 { // a long stream
			t.touch(s, now)
			continue
		}
		t.counts.Expired++
		t.remove(s)
	}
}

// remove takes a session out of the table. Turns in progress end without it.
func (t *Table) remove(s *Session) {
	if s.gone {
		return
	}
	s.gone = true
	delete(t.byKey, s.key)
	t.ages.Remove(s.age)
	if s.tenant.ages.Remove(s.own); s.tenant.ages.Len() == 0 {
		delete(t.tenants, s.tenant.name)
	}
	t.blocks.release(s.marks)
	t.dropKeys(s)
	s.marks, s.ranks = nil, [3]*worker.Rank{}
	if s.running == 0 {
		t.deactivate(s)
	}
}

// Rank returns the rank that took a leg of the session's last turn, nil if there is none.
func (t *Table) Rank(u *Turn, leg schedule.LegKind) *worker.Rank {
	if u.session == nil || int(leg) >= len(u.session.ranks) {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return u.session.ranks[leg]
}

// Placed notes that a rank takes a leg of the turn.
func (t *Table) Placed(u *Turn, leg schedule.LegKind, r *worker.Rank) {
	if u.session == nil || u.minor || int(leg) >= len(u.session.ranks) {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !u.session.gone {
		u.session.ranks[leg] = r
	}
}

// Result is the end of a turn.
type Result struct {
	OK             bool // an engine has answered
	Cached         int  // tokens that the engine found cached; -1 unknown
	Prompt, Output int  // tokens; 0 unknown
}

// End notes that a turn has ended. Only the first call has an effect. It returns what may be
// forgotten if that ends the session.
func (t *Table) End(u *Turn, res Result) (f Forget) {
	s := u.session
	if s == nil {
		return Forget{}
	}
	u.session = nil
	now := time.Now()
	t.mu.Lock()
	defer t.mu.Unlock()
	s.running--
	t.touch(s, now)
	if res.OK && !u.minor && res.Prompt > 0 {
		s.tokens = res.Prompt + max(res.Output, 0)
	}
	if res.OK {
		t.learn(s, u, res, now)
	}
	s.final = s.final || u.final
	switch {
	case s.running > 0:
	case s.gone:
		t.deactivate(s)
	case s.final:
		f = t.finish(s)
	default:
		t.hold(s, now)
	}
	t.arm(now)
	return f
}

// Forget says which blocks nobody uses any more: those of Keys from index Keep on, on Ranks. Keys
// are nil if the approximate index does not predict them.
type Forget struct {
	Keys  []blockhash.Seq
	Keep  int
	Ranks []*worker.Rank
	// Blocks is the number of blocks of the prompt that nobody uses any more, also without Keys.
	Blocks int
}

// Finish ends a session. If turns of it are in progress, it ends with the last of them, unless
// another one begins before. Finish does not say whether there was such a session.
func (t *Table) Finish(k Key) (f Forget) {
	t.mu.Lock()
	defer t.mu.Unlock()
	s := t.byKey[k]
	switch {
	case s == nil:
	case s.running > 0:
		s.final = true
	default:
		f = t.finish(s)
		t.arm(time.Now())
	}
	return f
}

func (t *Table) finish(s *Session) (f Forget) {
	t.counts.Finished++
	f.Keys = s.keys
	for _, r := range s.ranks {
		if r != nil && !slices.Contains(f.Ranks, r) {
			f.Ranks = append(f.Ranks, r)
		}
	}
	marks := s.marks
	s.keys, t.keys = nil, t.keys-len(s.keys)
	t.remove(s) // before the blocks are counted: the session itself uses them
	f.Keep = t.blocks.shared(marks) * markBlocks
	blocks := s.blocks
	if f.Keep >= blocks || len(marks)*markBlocks < blocks { // without all marks it is unknown what others use
		return Forget{}
	}
	f.Blocks = blocks - f.Keep
	return f
}
