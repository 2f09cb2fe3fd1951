// Package record writes down what a router sees and does, for sluice replay to
// ask afterwards what other weights would have done: every change that KV events
// make to the index, every choice with its prompt's block hashes, every outcome;
// and before these, what each rank held when the recording began.
//
// Recorder is its main type. It is the kvevents.Tap, disagg's recorder and the
// scheduler's; while nobody records, each of these costs one atomic load. cmd
// starts it into files (recording.dir) or into the admin API's stream (sluice
// record); Files writes those, Reader reads them. A prompt's text and its tokens
// are never recorded, only hashes of blocks; request ids are hashed too. Nothing
// here makes a request wait: what does not fit the bounded queue is dropped,
// counted, and the count stands in the recording.
package recording
