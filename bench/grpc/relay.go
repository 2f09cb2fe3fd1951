package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"sluice/bench/grpc/items"
)

// relay asks vLLM's /inference/v1/generate for each request and sends an item for each
// of its events, as one would write it with the standard library.
type relay struct {
	items.UnimplementedEngineServer
	url  string
	scan bool
	http *http.Client
}

func newRelay(engine string, scan bool) *relay {
	t := &http.Transport{MaxIdleConns: 1024, MaxIdleConnsPerHost: 1024, DisableCompression: true}
	return &relay{url: engine + "/inference/v1/generate", scan: scan, http: &http.Client{Transport: t}}
}

// event is what is read of an engine's.
type event struct {
	Choices []struct {
		Index    uint32   `json:"index"`
		TokenIDs []uint32 `json:"token_ids"`
		Finish   *string  `json:"finish_reason"`
	} `json:"choices"`
	Usage *struct {
		Prompt     uint32 `json:"prompt_tokens"`
		Completion uint32 `json:"completion_tokens"`
	} `json:"usage"`
}

// Generate implements items.EngineServer.
func (r *relay) Generate(req *items.Request, out grpc.ServerStreamingServer[items.Item]) error {
	body, err := json.Marshal(map[string]any{
		"model": req.Model, "token_ids": req.TokenIds, "stream": true, "stream_options": map[string]any{"include_usage": true},
		"sampling_params": map[string]any{"max_tokens": req.MaxTokens, "ignore_eos": true, "temperature": 0},
	})
	if err != nil {
		return err
	}
	hr, err := http.NewRequestWithContext(out.Context(), http.MethodPost, r.url, bytes.NewReader(body))
	if err != nil {
		return err
	}
	hr.Header.Set("Content-Type", "application/json")
	resp, err := r.http.Do(hr)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		why, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<10))
		return status.Errorf(codes.Internal, "the engine answers %d: %s", resp.StatusCode, why)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 16<<10), 8<<20)
	var it items.Item
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data: "))
		if !ok || string(data) == "[DONE]" {
			continue
		}
		if r.scan && searched(data, &it) {
			if err := out.Send(&it); err != nil {
				return err
			}
			continue
		}
		var e event
		if err := json.Unmarshal(data, &e); err != nil {
			return fmt.Errorf("an event that cannot be read: %w", err)
		}
		for _, c := range e.Choices {
			it := items.Item{TokenIds: c.TokenIDs, Index: c.Index}
			if c.Finish != nil {
				it.FinishReason = *c.Finish
			}
			if err := out.Send(&it); err != nil {
				return err
			}
		}
		if e.Usage != nil {
			if err := out.Send(&items.Item{Usage: &items.Usage{PromptTokens: e.Usage.Prompt, CompletionTokens: e.Usage.Completion}}); err != nil {
				return err
			}
		}
	}
	return lines.Err()
}

// searched reads an event that has ids and no finish, the least that can be done to
// one: what is left of the cost is gRPC's and the standard library's HTTP.
func searched(data []byte, it *items.Item) bool {
	_, rest, ok := bytes.Cut(data, []byte(`"token_ids":[`))
	list, rest, closed := bytes.Cut(rest, []byte("]"))
	if !ok || !closed || len(list) == 0 || !bytes.Contains(data, []byte(`"finish_reason":null`)) {
		return false
	}
	it.TokenIds = it.TokenIds[:0]
	for _, one := range bytes.Split(list, []byte(",")) {
		id, err := strconv.ParseUint(string(bytes.TrimSpace(one)), 10, 32)
		if err != nil {
			return false
		}
		it.TokenIds = append(it.TokenIds, uint32(id))
	}
	return true
}
