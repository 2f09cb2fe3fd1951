package admin

import (
	"embed"
	"net/http"
)

//go:embed console
var console embed.FS

// asset serves one file of the console. The list of files stands in Routes, so
// nothing else in the folder is reachable.
func asset(name, contentType string) func(*Server, http.ResponseWriter, *http.Request) {
	body, err := console.ReadFile("console/" + name)
	if err != nil {
		panic(err) // the build lacks a file that Routes names
	}
	return func(_ *Server, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.Write(body)
	}
}
