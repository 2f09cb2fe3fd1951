package disagg

import (
	"errors"
	"fmt"

	"sluice/dataplane/front"
	"sluice/dataplane/jsonscan"
)

// Family is the hand-over of one engine family. Its methods are pure and run on
// the request path: edits go into dst, values they hold are constants or borrow
// from their arguments.
type Family interface {
	// Name as it stands in config and in explain records.
	Name() string
	// PrefillEdits turns the client's body into the prefill leg's.
	PrefillEdits(dst []jsonscan.Edit, kind front.Kind, doc *jsonscan.Doc) []jsonscan.Edit
	// Handle finds in a prefill response what decode must be given. It fails
	// with ErrIncompleteHandle (wrapped) when there is none that a decode
	// engine could use; the request then decodes plainly. The result borrows
	// from body.
	Handle(body []byte) (handle []byte, err error)
	// DecodeEdits turns the client's body into the decode leg's.
	DecodeEdits(dst []jsonscan.Edit, handle []byte) []jsonscan.Edit
}

// ErrIncompleteHandle: prefill answered without a handle that decode can use.
var ErrIncompleteHandle = errors.New("disagg: incomplete handle")

// families is the one place a family is added.
var families = map[string]Family{
	"nixl": nixlPull{},
}

// FamilyByName gives a family by its name in config.
func FamilyByName(name string) (Family, error) {
	if f, ok := families[name]; ok {
		return f, nil
	}
	return nil, fmt.Errorf("disagg: unknown family %q; want nixl", name)
}
