// Package accesslog writes one line of JSON for each finished request to standard output, to a
// file that it rotates, or to syslog.
//
// Lines are formatted and written by one goroutine behind a bounded queue. If the output is slower
// than the requests, lines are dropped and counted; requests never wait for the log. A line holds
// no text of a prompt or of a response and no secret.
package accesslog
