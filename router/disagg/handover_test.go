package disagg

import "testing"

func TestFailsAtOnce(t *testing.T) {
	for seen, want := range map[string]int{
		`data: {"id":"x","choices":[]}` + "\n\n":                                                       0,
		`data: {"error":{"message":"m","type":"InternalServerError","code":500}}` + "\n\n":             500,
		"3a\r\n" + `data: {"error":{"message":"m","type":"BadRequestError","code":400}}` + "\n\n":      400,
		`data: {"error":"m"}` + "\n\n":                                                                 500,
		"event: message_start\ndata: {\"type\":\"message_start\"}\n\n":                                 0,
		"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"api_error\"}}\n\n":              500,
		"event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"invalid_request_error\"}}\n\n":  400,
		"event: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"code\":\"503\"}\n\n":          503,
		"event: error\ndata: {\"type\":\"error\",\"sequence_number\":0,\"code\":\"server_error\"}\n\n": 500,
		"event: response.created\ndata: {\"type\":\"response.created\"}\n\nevent: error\ndata: {}\n\n": 0,
		"": 0,
	} {
		if got := failsAtOnce([]byte(seen)); got != want {
			t.Errorf("%q: %d, want %d", seen, got, want)
		}
	}
}
