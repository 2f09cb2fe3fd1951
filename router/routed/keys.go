package routed

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/wire"
)

// keyless says whether a caller of the socket needs no API key.
func (e *Engine) keyless(key []byte, unix bool) bool {
	return e.opt.Gate == nil || unix && e.opt.FreeUnix && len(key) == 0
}

// Admit implements wire.Options.Admit: a caller without a good key is turned away
// with its HELLO.
func (e *Engine) Admit(key []byte, unix bool) *wire.Error {
	if e.keyless(key, unix) {
		return nil
	}
	if _, denied := e.opt.Gate.Enter(key, false); denied != nil {
		return &wire.Error{Code: wire.CodeUnauthorize, Message: "HELLO: " + keyProblem(denied)}
	}
	return nil
}

// enter asks the gate for one request: keys may have been taken out since the HELLO,
// and limits are of requests.
func (e *Engine) enter(s *wire.Stream) (front.Pass, *front.Denial) {
	if e.keyless(s.Key(), s.Unix()) {
		return nil, nil
	}
	return e.opt.Gate.Enter(s.Key(), true)
}

// keyProblem is a denial's message, in the words of the socket.
func keyProblem(d *front.Denial) string {
	if d.Reason == front.NoKey {
		return "the caller shows no API key; want one as key of its HELLO"
	}
	return d.Message
}

// modelDenied is a request for a model that its key is not good for.
type modelDenied struct{ key, model string }

func (d *modelDenied) Error() string {
	return fmt.Sprintf("key %q may not use model %q", d.key, cut(d.model, 100))
}

// mayUse says whether a key is good for all that a request names: an adapter is asked
// for by a field of its own, and engines take it for a
// model.
func mayUse(pass front.Pass, r *request) error {
	if pass == nil {
		return nil
	}
	if !pass.Allows(r.model) {
		return &modelDenied{pass.Name(), r.model}
	}
	if lora := r.text(fLoRA); lora != "" && !pass.Allows(lora) {
		return &modelDenied{pass.Name(), lora}
	}
	return nil
}
