package config

func (c *Config) checkTLS(bad report) {
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		bad("tls.cert", "and tls.key belong together; want both or none")
	}
	if c.TLS.ClientCA != "" && c.TLS.Cert == "" {
		bad("tls.client_ca", "has no effect without tls.cert and tls.key; want those too")
	}
	if (c.EngineTLS.Cert == "") != (c.EngineTLS.Key == "") {
		bad("engine_tls.cert", "and engine_tls.key belong together; want both or none")
	}
}
