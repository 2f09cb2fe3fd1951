//go:build !purego

package jsonscan

import "golang.org/x/sys/cpu"

// wide: 32 bytes are processed at a time by AVX2. Processors with AVX2 have BMI too.
var wide = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2

// wideString scans a string from p[i] on, of n bytes at p, in blocks of 32 bytes. It stops at a
// quote, a control character, or a backslash that does not begin a two-byte escape by lens;
// otherwise when less than a block is left. high is not 0 if one of the scanned bytes, up to 63
// after at, is 0x80 or more.
//
//go:noescape
func wideString(p *byte, i, n int, lens *[256]uint8) (at int, high uint32)

// wideForm returns which of the 64 bytes at p are commas, which are spaces (the first byte in the
// lowest bit), and which do not belong to an array of integers of up to seven digits, with commas
// between them and at most one space after each. The next block continues after this one.
//
//go:noescape
func wideForm(p *byte, before *simdCarry) (wrong, commas, spaces uint64)

// wideArray reads numbers from p on, which has eight bytes before it and n blocks of 64 bytes after
// it, in the form of wideForm. It reads blocks as long as they have this form, and of the first
// block that has not the numbers that end before the error. It stops when fewer than 32 numbers fit
// into ends.
//
//go:noescape
func wideArray(p *byte, n int, out *uint32, free int) (blocks int, ends uint64, read int)

// wideUTF8 validates the whole blocks of 32 bytes among n bytes at p by the method of Keiser and
// Lemire ("Validating UTF-8 in less than one instruction per byte", 2021). at is the end of the
// last block. Whether the last rune before at is complete is not checked.
//
//go:noescape
func wideUTF8(p *byte, n int) (at int, ok bool)
