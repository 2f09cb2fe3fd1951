package admin

import (
	"embed"
	"net/http"
)

//go:embed console
var console embed.FS

// asset serves one file of the console. Only files in Routes are reachable.
func asset(name, contentType string) func(*Server, http.ResponseWriter, *http.Request) {
	body, err := console.ReadFile("console/" + name)
	if err != nil {
		panic(err) // Routes names a file that is not embedded
	}
	return func(_ *Server, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.Write(body)
	}
}
