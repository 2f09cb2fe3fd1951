package engineapi

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/wire"
)

// needsNoKey says whether a caller of the socket needs no API key.
func (e *Engine) needsNoKey(key []byte, unix bool) bool {
	return e.opt.Authenticator == nil || unix && e.opt.UnixWithoutKey && len(key) == 0
}

// Admit implements wire.Options.Admit: a caller without a good key is turned away
// with its HELLO.
func (e *Engine) Admit(key []byte, unix bool) *wire.Error {
	if e.needsNoKey(key, unix) {
		return nil
	}
	if _, denied := e.opt.Authenticator.Authenticate(key, false); denied != nil {
		return &wire.Error{Code: wire.CodeUnauthorize, Message: "HELLO: " + rejectionMessage(denied)}
	}
	return nil
}

// authenticate asks the gate for one request: keys may have been taken out since the HELLO,
// and limits are of requests.
func (e *Engine) authenticate(s *wire.Stream) (front.Principal, *front.Rejection) {
	if e.needsNoKey(s.Key(), s.Unix()) {
		return nil, nil
	}
	return e.opt.Authenticator.Authenticate(s.Key(), true)
}

// rejectionMessage is a denial's message, in the words of the socket.
func rejectionMessage(d *front.Rejection) string {
	if d.Reason == front.MissingKey {
		return "the caller shows no API key; want one as key of its HELLO"
	}
	return d.Message
}

// modelDenied is a request for a model that its key is not good for.
type modelDenied struct{ key, model string }

func (d *modelDenied) Error() string {
	return fmt.Sprintf("key %q may not use model %q", d.key, truncate(d.model, 100))
}

// allowsModels says whether a key is good for all that a request names: an adapter is asked
// for by a field of its own, and engines take it for a
// model.
func allowsModels(pass front.Principal, r *request) error {
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
