package nixl

import "encoding/binary"

// MessagePrefix starts a record that is sent as a message because it cannot be written
// into the board. The slot's number (u32, little endian) and the 64 bytes of the record
// follow (nixl/connector/sluice_connector/report.py: message).
const MessagePrefix = "SLB1"

const messageBytes = len(MessagePrefix) + 4 + recordBytes

// CompleteMessage completes a slot by a record that arrived as a message. The errors
// are those of a record: ErrRecord, ErrForged, and ErrLate (the slot has a later
// CompletionSlot, or this one has its completion).
func (b *CompletionBoard) CompleteMessage(m []byte) error {
	err := error(ErrRecord)
	if len(m) == messageBytes && string(m[:len(MessagePrefix)]) == MessagePrefix {
		slot := binary.LittleEndian.Uint32(m[len(MessagePrefix):])
		w := rawRecordOf(m[len(MessagePrefix)+4:])
		if err = ErrForged; int(slot) < len(b.entries) {
			t, out := b.current(slot)
			if err = w.verify(t); err == nil {
				c := w.completion()
				if out && b.claim(t, c) {
					b.notify(t, c)
					return nil
				}
				err = ErrLate
			}
		}
	}
	b.refused.Add(1)
	return err
}
