package harness

// GoodHandle is a valid kv_transfer_params of a prefill leg's response in vLLM's format. Nothing
// listens on its port, so only scripted engines accept it.
const GoodHandle = `{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[7]],"remote_engine_id":"e","remote_request_id":"r","remote_host":"127.0.0.1","remote_port":1}`
