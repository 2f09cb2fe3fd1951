package certs

import "crypto/tls"

// Suites are the cipher suites of TLS 1.2 towards clients and engines: only those with
// forward secrecy (ECDHE) and authenticated encryption (AEAD). crypto/tls would offer CBC
// with SHA-1 too. TLS 1.3 has its own list. Callers must not modify Suites.
var Suites = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
	tls.TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
}
