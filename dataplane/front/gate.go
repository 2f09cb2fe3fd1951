package front

import (
	"bytes"

	"sluice/dataplane/jsonscan"
)

// Pass is what the request's key allows; nil where no keys are asked for.
func (x *Exchange) Pass() Pass { return x.holder }

// enter asks the gate; when it refuses, it has answered and gives false.
func (x *Exchange) enter(counts bool) bool {
	gate := x.srv.opt.Gate
	if gate == nil {
		return true
	}
	var denied *Denial
	x.holder, denied = gate.Enter(x.shownKey(), counts)
	if denied == nil && x.expects { // it is counted when its body comes
		denied = x.holder.Reached()
	}
	if denied == nil {
		if counts {
			x.holder.Limits(x.SetHeader)
		}
		return true
	}
	if denied.Reason == KeyLimit {
		x.holder.Limits(x.SetHeader)
	} else {
		x.SetHeader("WWW-Authenticate", "Bearer")
	}
	x.Error(denied.Reason, "", denied.Message, denied.RetryAfter)
	return false
}

// shownKey is the key that a request shows: OpenAI's clients send it as a bearer
// token, Anthropic's in a header line of its own.
func (x *Exchange) shownKey() []byte {
	const scheme = "Bearer "
	if v := x.head.find("Authorization"); len(v) > len(scheme) && equalFold(v[:len(scheme)], scheme) {
		return bytes.TrimLeft(v[len(scheme):], " ")
	}
	return x.head.find("X-Api-Key")
}

// mayUse says whether the key is good for the model named in the body; when not, it
// has answered.
func (x *Exchange) mayUse() bool {
	if x.holder == nil {
		return true
	}
	model := x.Doc.String(jsonscan.KeyModel, nil)
	if x.holder.Allows(string(model)) {
		return true
	}
	x.Error(KeyModel, "model", "key "+shown([]byte(x.holder.Name()))+" may not use model "+shown([]byte(model)), 0)
	return false
}
