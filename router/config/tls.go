package config

func (c *Config) checkTLS(bad report) {
	if (c.TLS.Cert == "") != (c.TLS.Key == "") {
		bad("tls.cert", "requires tls.key, and the reverse; want both or neither")
	}
	if c.TLS.ClientCA != "" && c.TLS.Cert == "" {
		bad("tls.client_ca", "requires tls.cert and tls.key; want all three")
	}
	if (c.EngineTLS.Cert == "") != (c.EngineTLS.Key == "") {
		bad("engine_tls.cert", "requires engine_tls.key, and the reverse; want both or neither")
	}
}
