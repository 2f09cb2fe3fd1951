// Package apikey identifies the holder of a request by the API key in the request, and limits how
// many requests and tokens each holder may use per minute.
//
// Keyring is the main type, the front's Authenticator. router/app creates it from the
// configuration and replaces its keys when the configuration is reloaded. The package holds a key
// only while it hashes it: it stores, logs and returns hashes and names, never keys.
package apikey
