package front

import (
	"bytes"
	"slices"
	"strconv"

	"sluice/dataplane/ascii"
	"sluice/dataplane/jsonscan"
)

// authenticate calls the Authenticator. If that rejects the request, authenticate responds and
// returns false.
func (x *httpExchange) authenticate(counts bool) bool {
	auth := x.srv.initial.Authenticator
	if auth == nil {
		return true
	}
	var rejection *Rejection
	x.Principal, rejection = auth.Authenticate(x.clientKey(), counts)
	if rejection == nil && x.awaitsContinue { // the request counts when its body arrives
		rejection = x.Principal.CheckLimits()
	}
	if rejection == nil {
		if counts {
			x.Principal.VisitLimitHeaders(x.SetHeader)
		}
		return true
	}
	if rejection.Reason == KeyLimitReached {
		x.Principal.VisitLimitHeaders(x.SetHeader)
	} else {
		x.SetHeader("WWW-Authenticate", "Bearer")
	}
	x.Error(rejection.Reason, "", rejection.Message, rejection.RetryAfter)
	return false
}

// seesDetails reports whether requests need a key and this one's key allows every model. The
// details of a state page name all models.
func (x *httpExchange) seesDetails() bool {
	auth, key := x.srv.initial.Authenticator, x.clientKey()
	if auth == nil || key == nil {
		return false
	}
	principal, rejection := auth.Authenticate(key, false)
	return rejection == nil && principal.Allows(anyModel)
}

// anyModel is a name that no model has. Only a key without a list of models allows it.
const anyModel = ""

// AllowedModels returns those of models that principal may use, all of them if principal is
// nil. It does not modify models.
func AllowedModels(principal Principal, models []string) []string {
	if principal == nil || principal.Allows(anyModel) {
		return models
	}
	return slices.DeleteFunc(slices.Clone(models), func(m string) bool { return !principal.Allows(m) })
}

// clientKey returns the key of the request: OpenAI's clients send it as a bearer token,
// Anthropic's in X-Api-Key.
func (x *httpExchange) clientKey() []byte {
	const scheme = "Bearer "
	if v := x.head.Find("Authorization"); len(v) > len(scheme) && ascii.EqualFold(v[:len(scheme)], scheme) {
		return bytes.TrimLeft(v[len(scheme):], " ")
	}
	return x.head.Find("X-Api-Key")
}

// authorizeModel checks that the key allows the model named in the body and each adapter that
// SGLang reads from other members. If not, it responds and returns false.
func (x *httpExchange) authorizeModel() bool {
	if x.Principal == nil {
		return true
	}
	if model := x.Doc.String(jsonscan.KeyModel); !x.Principal.Allows(string(model)) {
		x.rejectModel("model", "model", model)
		return false
	}
	for _, k := range [...]jsonscan.Key{jsonscan.KeyLoRAPath, jsonscan.KeyLoRAID} {
		if x.Doc.Has(k) && !x.authorizeAdapters(k) {
			return false
		}
	}
	return true
}

// authorizeAdapters checks a member with the name of an adapter or a list with one for each
// prompt, where null means none. It retains no names, so that a list of the size of a body
// takes no memory that the budget does not count.
func (x *httpExchange) authorizeAdapters(k jsonscan.Key) bool {
	raw, scratch := x.Doc.Raw(k), make([]byte, 0, 64)
	if raw[0] != '[' {
		return x.authorizeAdapter(k, raw, scratch)
	}
	for it := jsonscan.Walk(raw); it.Next(); {
		if !x.authorizeAdapter(k, it.Raw(), scratch) {
			return false
		}
	}
	return true
}

// maxAdapterName bounds the name of an adapter, in bytes as it stands in the body.
const maxAdapterName = 4 << 10

func (x *httpExchange) authorizeAdapter(k jsonscan.Key, raw, scratch []byte) bool {
	if string(raw) == "null" {
		return true
	}
	if raw[0] != '"' {
		x.Error(BadField, k.Name(), "field "+strconv.Quote(k.Name())+" must be a string, an array of strings and nulls, or null", 0)
		return false
	}
	if x.Principal.Allows(anyModel) {
		return true
	}
	if len(raw) > maxAdapterName {
		x.Error(BadField, k.Name(), "field "+strconv.Quote(k.Name())+" must name adapters in at most 4 KiB each", 0)
		return false
	}
	if name := jsonscan.Unquote(scratch, raw); !x.Principal.Allows(unsafeString(name)) {
		x.rejectModel(k.Name(), "adapter", name)
		return false
	}
	return true
}

func (x *httpExchange) rejectModel(field, what string, name []byte) {
	x.Error(ModelNotAllowed, field, "key "+quotedForError([]byte(x.Principal.Name()))+" may not use "+what+" "+quotedForError(name), 0)
}
