package sim

import "sluice/bench/sim/httpconn"

// TensorRT-LLM's surface: two endpoints, no /tokenize and flat errors. Chunk formats are vLLM's.

var trtllmGet = map[string]func(*conn, *httpconn.Request){
	"/health":      vllmGet["/health"],
	"/version":     vllmGet["/version"],
	"/v1/models":   serveModels,
	"/metrics":     func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "application/json", []byte("[]")) },
	"/server_info": func(c *conn, r *httpconn.Request) { c.Respond(r, 200, "application/json", []byte("{}")) },
}

var trtllmPost = map[string]func(*conn, *httpconn.Request){}
