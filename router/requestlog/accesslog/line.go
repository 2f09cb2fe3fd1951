package accesslog

import (
	"encoding/hex"
	"strconv"
	"time"

	"sluice/dataplane/jsonscan"
	"sluice/router/requestlog"
)

// timeFormat is RFC 3339 in UTC with milliseconds.
const timeFormat = "2006-01-02T15:04:05.000Z"

// appendLine appends the line of a finished request. docs/request-log.md describes its members. A
// member without a value is left out, except those that every request has.
func appendLine(b []byte, e *requestlog.Entry) []byte {
	b = append(b, `{"time":"`...)
	b = e.Received.UTC().AppendFormat(b, timeFormat)
	b = append(b, `","msg":"request","request_id":`...)
	b = appendQuoted(b, e.ID)
	if e.Trace.ID != (requestlog.TraceID{}) {
		b = append(b, `,"trace_id":"`...)
		b = hex.AppendEncode(b, e.Trace.ID[:])
		b = append(b, '"')
	}
	if e.Client.IsValid() {
		b = append(b, `,"client":"`...)
		b = e.Client.AppendTo(b)
		b = append(b, '"')
	}
	b = appendText(b, "key", e.Key)
	b = appendText(b, "method", e.Method)
	b = appendText(b, "endpoint", e.Endpoint)
	b = appendText(b, "model", e.Model)
	b = append(b, `,"stream":`...)
	b = strconv.AppendBool(b, e.Stream)
	b = appendInt(b, "status", int64(e.Status))
	b = appendText(b, "reason", e.Reason)
	b = appendText(b, "plan", e.Plan)
	b = appendText(b, "family", e.Family)
	b = appendText(b, "fallback", e.Fallback)
	b = appendText(b, "class", e.Class)
	if e.Tenant != e.Key {
		b = appendText(b, "tenant", e.Tenant)
	}
	predicted := -1
	if l := e.Leg("prefill"); l != nil {
		b = appendRank(b, "prefill", l)
		predicted = l.Predicted
	}
	if l := e.Leg("decode", "whole", "stored"); l != nil {
		b = appendRank(b, "decode", l)
		if predicted < 0 || l.Kind == "whole" {
			predicted = l.Predicted
		}
	}
	b = appendInt(b, "prompt_tokens", int64(e.PromptTokens))
	if predicted >= 0 {
		b = appendInt(b, "predicted_cached_tokens", int64(predicted))
	}
	if e.CachedTokens >= 0 {
		b = appendInt(b, "cached_tokens", int64(e.CachedTokens))
	}
	if e.OutputTokens >= 0 {
		b = appendInt(b, "output_tokens", int64(e.OutputTokens))
	}
	if e.Stream {
		b = appendInt(b, "events", e.Events)
	}
	b = appendMS(b, "queue_ms", e.Queue.Took)
	if e.Position > 0 {
		b = appendInt(b, "queue_position", int64(e.Position))
	}
	b = appendMS(b, "tokenize_ms", e.Tokenize.Took)
	b = appendMS(b, "ttft_ms", e.FirstToken)
	b = appendMS(b, "itl_p50_ms", e.ITLP50)
	b = appendMS(b, "itl_p99_ms", e.ITLP99)
	b = append(b, `,"total_ms":`...)
	b = appendMilliseconds(b, e.Total)
	b = appendInt(b, "request_bytes", int64(e.Bytes))
	b = appendInt(b, "response_bytes", e.ResponseBytes)
	b = appendInt(b, "retries", int64(e.Retries))
	b = appendInt(b, "migrations", int64(e.Migrations))
	if e.Preemptions > 0 {
		b = appendInt(b, "preemptions", int64(e.Preemptions))
		b = appendMS(b, "suspended_ms", e.Suspended)
	}
	if t := &e.Transfer; t.State != "" {
		b = appendText(b, "transfer", t.State)
		b = appendInt(b, "transfer_bytes", t.Bytes)
		b = appendMS(b, "transfer_ms", t.Took)
	}
	return append(b, "}\n"...)
}

func appendName(b []byte, name string) []byte {
	b = append(b, ',', '"')
	b = append(b, name...)
	return append(b, '"', ':')
}

func appendText(b []byte, name, value string) []byte {
	if value == "" {
		return b
	}
	return appendQuoted(appendName(b, name), value)
}

// appendQuoted appends a JSON string. A terminal shows it without interpreting it.
func appendQuoted(b []byte, value string) []byte {
	from := len(b)
	b = jsonscan.AppendQuoted(b, value)
	return append(b[:from], jsonscan.EscapeUnprintable(b[from:])...)
}

func appendInt(b []byte, name string, value int64) []byte {
	return strconv.AppendInt(appendName(b, name), value, 10)
}

func appendMS(b []byte, name string, d time.Duration) []byte {
	if d <= 0 {
		return b
	}
	return appendMilliseconds(appendName(b, name), d)
}

// appendMilliseconds appends d in milliseconds with three decimals.
func appendMilliseconds(b []byte, d time.Duration) []byte {
	us := max(d, 0).Microseconds()
	b = strconv.AppendInt(b, us/1000, 10)
	return append(b, '.', byte('0'+us/100%10), byte('0'+us/10%10), byte('0'+us%10))
}

func appendRank(b []byte, leg string, l *requestlog.Leg) []byte {
	b = appendText(b, leg+"_worker", l.Worker)
	return appendInt(b, leg+"_rank", int64(l.Rank))
}
