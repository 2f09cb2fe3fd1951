// Package config is the router's configuration: one strict YAML file, with
// environment and flags over it. Every field has a default, a doc comment and
// a check; an error names the file, line, column, field, value and what would
// be accepted. Of this module it imports only worker.
package config
