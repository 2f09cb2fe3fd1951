package jsonscan

import "bytes"

// IsSensitive reports whether name is that of a member in which engines read a media location, a
// request id or arguments of a loader. Package fieldrules checks these before the router forwards a body.
// Doc.MayBeSensitive reports whether a body has any. Case is ignored because Go's JSON decoder
// ignores it.
func IsSensitive(name []byte) bool {
	const longest = len("mm_processor_kwargs")
	if len(name) < len("url") || len(name) > longest {
		return false
	}
	var lower [longest]byte
	for i, c := range name {
		if 'A' <= c && c <= 'Z' {
			c |= 0x20
		}
		lower[i] = c
	}
	switch string(lower[:len(name)]) {
	case "url", "image_url", "video_url", "audio_url", "file_url", "server_url",
		"image", "video", "audio", "images", "videos", "audios",
		"input_image", "input_video", "input_audio",
		"image_data", "video_data", "audio_data", "source", "rid", "mm_processor_kwargs":
		return true
	}
	return false
}

// mayBeSensitive is IsSensitive for a name as it stands in the body. A name with escapes may be any
// name.
func mayBeSensitive(raw []byte) bool {
	return IsSensitive(raw) || len(raw) <= 6*maxNameLen && bytes.IndexByte(raw, '\\') >= 0
}
