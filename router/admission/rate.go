package admission

import "time"

// rateMeter measures how many tokens of a pool or a tenant are dispatched per second while it has waiting
// requests, over about the last rateWindow or tenantRateWindow of such time.
type rateMeter struct {
	tokens, seconds float64
	pause           float64 // s; the longest between two events lately
	since, last     int64   // ns; of the time with requests and of the last event; meaningful while busy
	busy            bool
}

const (
	rateWindow       = 10.0 // s
	tenantRateWindow = 3.0
	// minRateTime is the time, in s, that must have been measured before a rate is used.
	minRateTime = 0.25
)

func (m *rateMeter) begin(now int64) {
	if !m.busy {
		m.resume(now)
	}
}

// resume is begin for a meter whose time without requests has no end call.
func (m *rateMeter) resume(now int64) { m.busy, m.since, m.last = true, now, now }

// busyFor returns how long there have been waiting requests without a break.
func (m *rateMeter) busyFor(now int64) time.Duration {
	if !m.busy {
		return 0
	}
	return time.Duration(now - m.since)
}

func (m *rateMeter) end(now int64) {
	m.advance(now, rateWindow)
	m.busy = false
}

func (m *rateMeter) add(now, tokens int64, window float64) {
	m.advance(now, window)
	m.tokens += float64(tokens)
}

// advance adds the time since the last event, and lets what was measured before fade.
func (m *rateMeter) advance(now int64, window float64) {
	if !m.busy {
		return
	}
	elapsed := m.elapsed(now, window)
	m.last = now
	if elapsed <= 0 {
		return
	}
	fade := max(0, 1-elapsed/window)
	m.tokens, m.seconds = m.tokens*fade, m.seconds*fade+elapsed
	m.pause = max(elapsed, m.pause*max(0, 1-elapsed/(4*window)))
}

// elapsed returns how much of the time since the last event counts, in s: half of the window, or twice the
// longest pause lately if that is more. Where dispatches come more often, a longer pause is a stall of the
// engines. It says nothing about the rate after it, and would hide that for many times the window.
func (m *rateMeter) elapsed(now int64, window float64) float64 {
	return min(float64(now-m.last)/1e9, max(window/2, 2*m.pause))
}

// perSecond returns the rate, 0 if it is not known. The time since the last dispatch counts.
func (m *rateMeter) perSecond(now int64, window float64) float64 {
	seconds := m.seconds
	if m.busy {
		seconds += m.elapsed(now, window)
	}
	if seconds < minRateTime {
		return 0
	}
	return m.tokens / seconds
}
