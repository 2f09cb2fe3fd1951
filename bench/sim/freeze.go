package sim

// Freeze stops the engine core of every rank, as SIGSTOP to vLLM's EngineCore process
// does. The API server continues to accept requests and to serve /health, /v1/models
// and /metrics with the current values; nothing else happens until Thaw. Freeze returns
// when all ranks have stopped.
func (e *Engine) Freeze() {
	l := e.incarnation()
	if l == nil {
		return
	}
	for _, r := range l.Ranks {
		r.Freeze()
	}
}

// Thaw makes frozen cores continue.
func (e *Engine) Thaw() {
	l := e.incarnation()
	if l == nil {
		return
	}
	for _, r := range l.Ranks {
		r.Thaw()
	}
}
