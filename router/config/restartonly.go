package config

import (
	"slices"
	"strings"
)

type restartOnlyFields struct {
	why   string
	paths []string
}

// restartOnly has the reason why a reload cannot apply a field or a group of fields: the change would
// break connected clients, or the object that was created from it cannot be replaced while requests
// use it. A test fails for a field that is neither here nor in reloadable.
var restartOnly = []restartOnlyFields{
	{"the socket is bound at the start; a restart passes it on, or binds the new one, without losing a request",
		[]string{"listen", "admin.listen", "engine_api.listen", "engine_api.unix_socket", "engine_api.http", "registration.listen", "lmcache.proxy_host", "lmcache.proxy_port", "transfers.zmq_listen"}},
	{"the listener is created with these file names; their contents are read again when they change",
		[]string{"tls", "engine_api.tls_cert", "engine_api.tls_key", "registration.tls_cert", "registration.tls_key", "registration.client_ca"}},
	{"connections to engines are created with these file names; their contents are read again when they change", []string{"engine_tls"}},
	{"open connections and running probes use it", []string{"engine_key"}},
	{"open consoles and tools have the old token", []string{"admin.token", "admin.runtime_file"}},
	{"loggers are created at the start", []string{"log.format"}},
	{"the parts of a family are created at the start", []string{"pd.family"}},
	{"completion slots and notification sockets are created at the start, and transfers in flight use them", []string{"lmcache", "transfers"}},
	{"open connections have buffers of this size", []string{"limits.max_head"}},
	{"outputs are opened at the start, and entries wait in them", []string{"access_log", "tracing"}},
	{"the set of series is chosen at the start", []string{"metrics"}},
	{"it is used only at the start", []string{"fleet", "engine_api.min_workers", "engine_api.start_timeout"}},
	{"event loops are started once and own their streams", []string{"relay.driver", "relay.threads"}},
	{"callers of the engine socket have received these values in the greeting", []string{"engine_api"}},
	{"discovery runs continuously; a new source would start empty and remove all workers", []string{"discovery", "kube"}},
	{"registered workers were admitted by it, and report sockets are open to these networks", []string{"registration.networks"}},
	{"the index is created with it; a new one would start empty", []string{"index.max_bytes"}},
	{"the snapshot writer is created at the start", []string{"index.snapshot", "index.snapshot_interval"}},
	{"the current recording was started with it", []string{"recording"}},
	{"the table of records is created with this size", []string{"schedule.explain", "admin.timelines"}},
}

// restartReason returns why a change of the field at path needs a new process. It returns "" for a
// reloadable field, and for one whose reason depends on the change (entryRestartReason).
func restartReason(path string) string {
	for _, f := range restartOnly {
		if slices.Contains(f.paths, path) { // the reason of a field takes precedence over that of its group
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

// entryRestartReason returns why a change of a list's entry needs a new process.
func entryRestartReason(path string) string {
	switch list, _, _ := strings.Cut(path, "["); list {
	case "api_keys":
		return "the first key starts the authentication of clients, and the removal of the last one ends it; engines then get or no longer get the clients' own keys"
	case "models":
		return "the parts of a family are created at the start, so a model's pd cannot be added, removed or given another family"
	case "discovery.dns":
		return restartReason("discovery.dns")
	}
	return ""
}
