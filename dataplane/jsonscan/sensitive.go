package jsonscan

import "bytes"

// IsSensitive says whether name is that of a member in which engines read where media is to be
// fetched from, or the id of a request: what a front must look at before it forwards a body
// (dataplane/front, enginefields.go). Doc.Watched says whether there is any.
func IsSensitive(name []byte) bool {
	switch string(name) {
	case "url", "image_url", "video_url", "audio_url", "file_url", "server_url",
		"image", "video", "audio", "images", "videos", "audios",
		"input_image", "input_video", "input_audio",
		"image_data", "video_data", "audio_data", "source", "rid":
		return true
	}
	return false
}

// mayBeSensitive is IsSensitive of a name as it stands in the body: of one with escapes it is not
// known without resolving them.
func mayBeSensitive(raw []byte) bool {
	return IsSensitive(raw) || len(raw) <= 6*maxNameLen && bytes.IndexByte(raw, '\\') >= 0
}
