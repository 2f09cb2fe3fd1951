// Package apikey says whose request it is by the key that it shows, and how much
// its holder may send. A Ring is the front's Gate; cmd makes it from the
// configuration and replaces its keys when that is read again. It never sees a
// key but for the time of hashing it, and neither logs nor tells one.
package apikey
