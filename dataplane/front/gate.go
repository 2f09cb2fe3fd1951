package front

import (
	"bytes"
	"encoding/json"
	"slices"
	"strconv"

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

// seesDetails says whether keys are asked for and the request shows one that is good for
// every model: the details of a state page name them all.
func (x *Exchange) seesDetails() bool {
	gate, key := x.srv.opt.Gate, x.shownKey()
	if gate == nil || key == nil {
		return false
	}
	holder, denied := gate.Enter(key, false)
	return denied == nil && holder.Allows(anyModel)
}

// anyModel is a name that no model has: only a key without a list of models allows it.
const anyModel = ""

// Allowed are the models that the holder of pass may use; nil: nobody asks for keys.
func Allowed(pass Pass, models []string) []string {
	if pass == nil || pass.Allows(anyModel) {
		return models
	}
	return slices.DeleteFunc(slices.Clone(models), func(m string) bool { return !pass.Allows(m) })
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

// mayUse says whether the key is good for the model named in the body, and for each
// adapter that SGLang takes from other members; when not, it has answered.
func (x *Exchange) mayUse() bool {
	if x.holder == nil {
		return true
	}
	if model := x.Doc.String(jsonscan.KeyModel, nil); !x.holder.Allows(string(model)) {
		x.mayNotUse("model", "model", model)
		return false
	}
	for _, k := range [...]jsonscan.Key{jsonscan.KeyLoRAPath, jsonscan.KeyLoRAID} {
		if x.Doc.Has(k) && !x.mayUseAdapters(k) {
			return false
		}
	}
	return true
}

// mayUseAdapters checks a member that names an adapter, or holds a list with one for each
// prompt, in which null stands for none.
func (x *Exchange) mayUseAdapters(k jsonscan.Key) bool {
	var one *string
	var list []*string
	raw := x.Doc.Raw(k)
	if json.Unmarshal(raw, &one) == nil {
		list = []*string{one}
	} else if json.Unmarshal(raw, &list) != nil {
		x.Error(BadField, k.Name(), "field "+strconv.Quote(k.Name())+" must be a string, an array of strings and nulls, or null", 0)
		return false
	}
	for _, name := range list {
		if name != nil && !x.holder.Allows(*name) {
			x.mayNotUse(k.Name(), "adapter", []byte(*name))
			return false
		}
	}
	return true
}

func (x *Exchange) mayNotUse(field, what string, name []byte) {
	x.Error(KeyModel, field, "key "+shown([]byte(x.holder.Name()))+" may not use "+what+" "+shown(name), 0)
}
