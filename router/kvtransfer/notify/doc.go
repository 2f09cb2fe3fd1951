// Package notify is the board on which LMCache's prefill workers say that a
// request's KV has reached its decode worker.
//
// Its main type is Board: a ZMQ PULL socket (dataplane/zmtp) that binds and to which every
// tensor-parallel rank of a prefill worker pushes one message a request. The
// router's lmcache family says whom it waits for (Expect) before prefill is
// sent; cmd opens and closes the board. What nobody waits for (yet) is kept for
// a while and bounded. Reports of our own connector that come to the same socket are
// handed on (Options.Report). The board never connects anywhere and never answers.
package notify
