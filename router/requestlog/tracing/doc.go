// Package tracing exports finished requests as OpenTelemetry traces over OTLP, by gRPC or HTTP.
//
// A request's spans are made when it has ended, from its requestlog.Entry, by the goroutine that
// also sends them. That is why a trace can be kept for what happened during the request (tail
// sampling), and why an unsampled request costs nothing but the ids that engines are sent. The queue
// is bounded: with a slow or missing collector spans are lost and counted, and no request waits.
//
// The spans and their parents:
//
//	request (server)
//	├── queue         waits for a worker
//	├── tokenize      the prompt's token ids and cached blocks
//	├── choose        one for each choice of a rank
//	├── prefill       the engine call (client); engines receive this span as their parent
//	├── kv_transfer   as observed by Sluice, from prefill's response to the report
//	└── decode        the engine call (client); "whole" where one rank does both
//	    └── stream    from the first token to the end
//
// Attributes are those of OpenTelemetry's semantic conventions for HTTP and generative AI, of the
// version of the package semconv that is imported; Sluice's own begin with "sluice.".
package tracing
