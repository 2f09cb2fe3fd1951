package engineapi

import (
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/wire"
)

// needsNoKey returns whether a caller of the socket is admitted without an API key.
func (e *Engine) needsNoKey(key []byte, unix bool) bool {
	return e.opt.Authenticator == nil || unix && e.opt.UnixWithoutKey && len(key) == 0
}

// Admit implements wire.Options.Admit: a caller without a valid key is rejected at its HELLO.
func (e *Engine) Admit(key []byte, unix bool) *wire.Error {
	if e.needsNoKey(key, unix) {
		return nil
	}
	if _, denied := e.opt.Authenticator.Authenticate(key, false); denied != nil {
		return &wire.Error{Code: wire.CodeUnauthorize, Message: "HELLO: " + rejectionMessage(denied)}
	}
	return nil
}

// authenticate checks the key of one request, because keys may have been removed since the
// HELLO and limits apply to requests.
func (e *Engine) authenticate(s *wire.Stream) (front.Principal, *front.Rejection) {
	if e.needsNoKey(s.Key(), s.Unix()) {
		return nil, nil
	}
	return e.opt.Authenticator.Authenticate(s.Key(), true)
}

// rejectionMessage returns the message of a rejection, in terms of the socket's protocol.
func rejectionMessage(d *front.Rejection) string {
	if d.Reason == front.MissingKey {
		return "the caller shows no API key; want one as key of its HELLO"
	}
	return d.Message
}

// modelDenied is the error for a request for a model that its key may not use.
type modelDenied struct{ key, model string }

func (d *modelDenied) Error() string {
	return fmt.Sprintf("key %q may not use model %q", d.key, truncate(d.model, 100))
}

// allowsModels checks that the key may use every model that the request names. It also checks
// the adapter, which has a field of its own but which engines treat as a model.
func allowsModels(principal front.Principal, r *request) error {
	if principal == nil {
		return nil
	}
	if !principal.Allows(r.model) {
		return &modelDenied{principal.Name(), r.model}
	}
	if lora := r.text(fLoRA); lora != "" && !principal.Allows(lora) {
		return &modelDenied{principal.Name(), lora}
	}
	return nil
}
