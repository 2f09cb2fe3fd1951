package main

// Holds the chosen dependencies in go.mod until their first users land.
import (
	_ "github.com/HdrHistogram/hdrhistogram-go"
	_ "github.com/VictoriaMetrics/metrics"
	_ "github.com/dustin/go-humanize"
	_ "github.com/goccy/go-yaml"
	_ "github.com/klauspost/compress/zstd"
	_ "github.com/pebbe/zmq4"
	_ "github.com/tinylib/msgp/msgp"
	_ "github.com/valyala/fasthttp"
	_ "github.com/zeebo/xxh3"
	_ "golang.org/x/sys/unix"
)
