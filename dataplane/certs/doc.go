// Package certs keeps what TLS needs from PEM files, and reads them again when they
// change: a certificate is renewed under a running process without a connection
// lost. cmd makes a Keeper for each side (clients, engines) and hands its
// *tls.Config to front and upstream, which know nothing of files.
package certs
