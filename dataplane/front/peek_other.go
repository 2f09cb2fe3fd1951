//go:build !unix

package front

import "errors"

var errNoPeek = errors.New("PROXY headers are not read on this system")

func peekRaw(int, []byte) (int, bool, error) { return 0, false, errNoPeek }
func skip(int, []byte) error                 { return errNoPeek }
