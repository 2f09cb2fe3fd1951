// Package recording records what a router observes and decides, so that sluice replay can
// compute what other scheduler weights would have done. A recording contains every change that
// KV events make to the index, every choice with the block hashes of its prompt, and every
// outcome. Before these it contains the blocks that each rank held when the recording began.
//
// Recorder is the main type. It implements kvevents.IndexObserver and pd.Recorder. While no
// recording is active, each of its calls costs one atomic load. router/app starts it into files
// (recording.dir) or into a stream of the admin API, which sluice record reads. Files writes
// files and Reader reads them. A recording never contains the text or the tokens of a prompt,
// only hashes of its blocks; request ids are hashed too. The package never delays a request:
// entries that do not fit into the bounded queue are dropped, and the recording contains their
// number.
package recording
