package config

import (
	"slices"
	"strings"
)

type restartOnlyFields struct {
	why   string
	paths []string
}

// restartOnly says why a running router cannot take over a field, or a group of them: what it
// would break for those who are connected, or what has been made of it at the start that
// cannot be made anew under requests. A field that is neither here nor in live fails a
// test.
var restartOnly = []restartOnlyFields{
	{"the socket is bound when the router starts; a restart passes it on, or binds the new one, without losing a request",
		[]string{"listen", "admin.listen", "engine_api.listen", "engine_api.unix_socket", "engine_api.http", "registration.listen", "lmcache.proxy_host", "lmcache.proxy_port", "transfers.zmq_listen"}},
	{"the listener was made with these files, whose contents are read again when they change",
		[]string{"tls", "engine_api.tls_cert", "engine_api.tls_key", "registration.tls_cert", "registration.tls_key", "registration.client_ca"}},
	{"connections to engines were made with these files, whose contents are read again when they change", []string{"engine_tls"}},
	{"it is part of how workers are asked, which all connections and probes under way have begun with", []string{"engine_key"}},
	{"consoles and tools that are open show the old token; a restart keeps it, or begins with the new one", []string{"admin.token", "admin.runtime_file"}},
	{"every part of the router has its logger by now", []string{"log.format"}},
	{"what belongs to a family is made when the router starts", []string{"pd.family"}},
	{"tickets and sockets of notifications are made when the router starts, and hand-overs wait by them", []string{"lmcache", "transfers"}},
	{"buffers of connections have this size from their beginning", []string{"limits.max_head"}},
	{"the series that are shown are chosen when the router starts", []string{"metrics"}},
	{"it is used when the router starts, and never again", []string{"fleet", "engine_api.min_workers", "engine_api.start_timeout"}},
	{"what drives streams is started once, and has them for their whole life", []string{"relay.driver", "relay.threads"}},
	{"callers of the engine socket were told these terms when they connected", []string{"engine_api"}},
	{"where workers come from is asked without a pause; another source begins with none, and would take the others out", []string{"discovery", "kube"}},
	{"workers that are registered were let in by it, and sockets for their reports are open to these networks", []string{"registration.networks"}},
	{"the index is made with it, and another one would begin empty", []string{"index.max_bytes"}},
	{"who keeps the index's snapshot is made when the router starts", []string{"index.snapshot", "index.snapshot_interval"}},
	{"the recording that runs was begun with it", []string{"recording"}},
	{"the table of records is made with this size", []string{"schedule.explain"}},
}

// restartReason is why a field needs a new process; "" of one that does not, or whose reason
// lies in what it is changed to.
func restartReason(path string) string {
	for _, f := range restartOnly {
		if slices.Contains(f.paths, path) { // a field's own reason goes before its group's
			return f.why
		}
	}
	for _, f := range restartOnly {
		if slices.ContainsFunc(f.paths, func(p string) bool { return strings.HasPrefix(path, p+".") }) {
			return f.why
		}
	}
	return ""
}

// entryRestartReason is why an entry of a list needs a new process.
func entryRestartReason(path string) string {
	switch list, _, _ := strings.Cut(path, "["); list {
	case "api_keys":
		return "between no keys and some, what clients show goes to engines, or does not; that changes with the process"
	case "models":
		return "models with settings of their own come, go and change their family with the process: what belongs to a family is made when it starts"
	case "discovery.dns":
		return restartReason("discovery.dns")
	}
	return ""
}
