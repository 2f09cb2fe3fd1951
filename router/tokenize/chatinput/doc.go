// Package chatinput converts the bodies of requests to what a chat template is rendered with, as
// vLLM's server does before it renders (vLLM 0.32: renderers/chat_utils.py, renderers/params.py,
// and the protocol and serving modules of openai/chat_completion, openai/responses and anthropic).
//
// Read accepts only bodies of which it knows exactly what the server makes of them. For all others
// it returns a reason: unusual types that the server coerces or rejects, media, members that change
// the tokens in a way that is not modelled. Such a prompt's ids come from the engine.
// testdata/vllm.jsonl contains what the server's own code made of the same bodies;
// scripts/tokens/oracle.py writes it.
//
// The package never renders, and keeps the order of members and the spelling of numbers, because
// templates print both.
package chatinput
