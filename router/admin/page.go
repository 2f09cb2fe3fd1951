package admin

import (
	"embed"
	"io/fs"
	"net/http"
	"path"
)

// console has the files of the console: its page, style and modules, and uPlot, which draws its
// charts (console/uplot, with its licence, which NOTICE repeats).
//
//go:embed console
var console embed.FS

// contentTypes are the types of the console's files that the server serves, by their extension.
var contentTypes = map[string]string{
	".html": "text/html; charset=utf-8",
	".js":   "text/javascript; charset=utf-8",
	".css":  "text/css; charset=utf-8",
}

// consoleRoutes returns a public route for each file of the console. The page itself is at /.
func consoleRoutes() []Route {
	files, err := fs.Sub(console, "console")
	if err != nil {
		panic(err) // the folder is embedded
	}
	var routes []Route
	err = fs.WalkDir(files, ".", func(name string, d fs.DirEntry, err error) error {
		contentType := contentTypes[path.Ext(name)]
		if err != nil || d.IsDir() || contentType == "" {
			return err
		}
		body, err := fs.ReadFile(files, name)
		if err != nil {
			return err
		}
		at, summary := "/"+name, "a file of the console"
		if name == "console.html" {
			at, summary = "/{$}", "the console"
		}
		routes = append(routes, Route{Method: "GET", Path: at, Summary: summary, public: true, serve: asset(body, contentType)})
		return nil
	})
	if err != nil {
		panic(err) // embedded files can be read
	}
	return routes
}

func asset(body []byte, contentType string) func(*Server, http.ResponseWriter, *http.Request) {
	return func(_ *Server, w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", contentType)
		w.Write(body)
	}
}
