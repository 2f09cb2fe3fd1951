//go:build !purego

package jsonscan

import "golang.org/x/sys/cpu"

// wide: 32 bytes are looked at together, by AVX2. Processors that have it have the rest too.
var wide = cpu.X86.HasAVX2 && cpu.X86.HasBMI1 && cpu.X86.HasBMI2

// wideString passes over the characters of a string from p[i] on, of n bytes at p, in
// blocks of 32 bytes. It stops at a quote, a control character, or a backslash that
// begins no escape of two bytes by lens; else where less than a block is left. high is
// not 0 where a byte that it looked at, up to 63 behind at, is 0x80 or more.
//
//go:noescape
func wideString(p *byte, i, n int, lens *[256]uint8) (at int, high uint32)

// wideForm says which of the 64 bytes at p are commas and which are spaces, the first in the
// lowest bit, and which are wrong: not of an array of integers of up to seven digits with
// commas between them and at most one space behind each. The next block goes on behind this one.
//
//go:noescape
func wideForm(p *byte, before *simdCarry) (wrong, commas, spaces uint64)

// wideArray reads numbers from p on, which has eight bytes before it and n times 64 behind it,
// by the form of wideForm: blocks as far as nothing in them is wrong, and if one is, of that the
// numbers whose ends come before, ends. It stops where fewer than 32 numbers would have room.
//
//go:noescape
func wideArray(p *byte, n int, out *uint32, free int) (blocks int, ends uint64, read int)

// wideUTF8 checks the whole blocks of 32 bytes among n bytes at p, by the method of
// Keiser and Lemire ("Validating UTF-8 in less than one instruction per byte", 2021).
// at is where the last one ends; whether the last rune before at is whole is not said.
//
//go:noescape
func wideUTF8(p *byte, n int) (at int, ok bool)
