package schedule

import (
	"cmp"
	"encoding/json"
	"time"
)

// This file keeps the former names of members of explain records for one release. Records are
// written with both names, and read with either: a router of the previous release sends the former
// ones only.

type formerRecord struct {
	Begun            time.Time       `json:"begun"`
	DecisionsNotKept int             `json:"decisions_not_kept,omitempty"`
	Pairs            []JointDecision `json:"pairs,omitempty"`
	NotesNotKept     int             `json:"notes_not_kept,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (r Record) MarshalJSON() ([]byte, error) {
	type members Record
	return json.Marshal(struct {
		members
		formerRecord
	}{members(r), formerRecord{r.Started, r.Dropped, r.Joint, r.LostNotes}})
}

// UnmarshalJSON implements json.Unmarshaler.
func (r *Record) UnmarshalJSON(text []byte) error {
	type members Record
	var v struct {
		members
		formerRecord
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	*r = Record(v.members)
	r.Started = cmp.Or(r.Started, v.Begun)
	r.Dropped = cmp.Or(r.Dropped, v.DecisionsNotKept)
	r.LostNotes = cmp.Or(r.LostNotes, v.NotesNotKept)
	if r.Joint == nil {
		r.Joint = v.Pairs
	}
	return nil
}

type formerCandidate struct {
	Guessed bool `json:"overlap_guessed,omitempty"`
	Awaited bool `json:"overlap_awaited,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (c Candidate) MarshalJSON() ([]byte, error) {
	type members Candidate
	return json.Marshal(struct {
		members
		formerCandidate
	}{members(c), formerCandidate{c.Approx, c.InFlight}})
}

// UnmarshalJSON implements json.Unmarshaler.
func (c *Candidate) UnmarshalJSON(text []byte) error {
	type members Candidate
	var v struct {
		members
		formerCandidate
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	*c = Candidate(v.members)
	c.Approx = c.Approx || v.Guessed
	c.InFlight = c.InFlight || v.Awaited
	return nil
}

type formerJointDecision struct {
	Why string `json:"why"`
}

// MarshalJSON implements json.Marshaler.
func (d JointDecision) MarshalJSON() ([]byte, error) {
	type members JointDecision
	return json.Marshal(struct {
		members
		formerJointDecision
	}{members(d), formerJointDecision{d.Reason}})
}

// UnmarshalJSON implements json.Unmarshaler.
func (d *JointDecision) UnmarshalJSON(text []byte) error {
	type members JointDecision
	var v struct {
		members
		formerJointDecision
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	*d = JointDecision(v.members)
	d.Reason = cmp.Or(d.Reason, v.Why)
	return nil
}

type formerRemote struct {
	PairRate float64 `json:"pair_ms_per_token,omitempty"`
}

// MarshalJSON implements json.Marshaler.
func (r Remote) MarshalJSON() ([]byte, error) {
	type members Remote
	return json.Marshal(struct {
		members
		formerRemote
	}{members(r), formerRemote{r.TransferRate}})
}

// UnmarshalJSON implements json.Unmarshaler.
func (r *Remote) UnmarshalJSON(text []byte) error {
	type members Remote
	var v struct {
		members
		formerRemote
	}
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	*r = Remote(v.members)
	r.TransferRate = cmp.Or(r.TransferRate, v.PairRate)
	return nil
}
