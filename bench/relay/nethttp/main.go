// Command nethttp is a minimal proxy made with the standard library, with which `make
// bench-relay` compares the router.
//
//	nethttp 127.0.0.1:PORT http://ENGINE
package main

import (
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"time"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: nethttp LISTEN ENGINE_URL")
		os.Exit(2)
	}
	engine, err := url.Parse(os.Args[2])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(engine) },
		Transport:     &http.Transport{MaxIdleConnsPerHost: 512, DisableCompression: true},
		FlushInterval: -1,
		ErrorLog:      log.New(io.Discard, "", 0),
	}
	srv := http.Server{Addr: os.Args[1], Handler: proxy, ReadHeaderTimeout: 10 * time.Second}
	fmt.Fprintln(os.Stderr, srv.ListenAndServe())
	os.Exit(1)
}
