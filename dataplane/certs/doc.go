// Package certs loads certificates, keys and CAs from PEM files and reloads them when the
// files change, so that a certificate can be renewed without losing a connection.
//
// Its main type is Reloader. The router makes one for clients and one for engines and passes
// their *tls.Config to front and upstream, which know nothing of files. The package never
// writes a file and never weakens verification: an unreadable file leaves the last good
// state in use.
package certs
