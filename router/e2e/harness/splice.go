package harness

// PrefillParams is the member that the router adds to the body of a prefill leg of the NIXL family.
const PrefillParams = `"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`
