//go:build !purego

#include "textflag.h"

// The three tables are asked by the high and the low half of a byte and by the high half
// of the next one; a bit left in all three names what is wrong with the two: 01 a
// sequence too short, 02 too long, 04 and 20 and 40 overlong, 08 and 40 above U+10FFFF,
// 10 a surrogate, 80 two continuations, which is right behind a lead of three or four.
// Both halves of a register hold the same.
DATA firstHigh<>+0(SB)/8, $0x0202020202020202
DATA firstHigh<>+8(SB)/8, $0x4915012180808080
DATA firstHigh<>+16(SB)/8, $0x0202020202020202
DATA firstHigh<>+24(SB)/8, $0x4915012180808080
GLOBL firstHigh<>(SB), RODATA|NOPTR, $32

DATA firstLow<>+0(SB)/8, $0xcbcbcb8b8383a3e7
DATA firstLow<>+8(SB)/8, $0xcbcbdbcbcbcbcbcb
DATA firstLow<>+16(SB)/8, $0xcbcbcb8b8383a3e7
DATA firstLow<>+24(SB)/8, $0xcbcbdbcbcbcbcbcb
GLOBL firstLow<>(SB), RODATA|NOPTR, $32

DATA nextHigh<>+0(SB)/8, $0x0101010101010101
DATA nextHigh<>+8(SB)/8, $0x01010101babaaee6
DATA nextHigh<>+16(SB)/8, $0x0101010101010101
DATA nextHigh<>+24(SB)/8, $0x01010101babaaee6
GLOBL nextHigh<>(SB), RODATA|NOPTR, $32

// The greatest last three bytes that want nothing behind them.
DATA complete<>+0(SB)/8, $0xffffffffffffffff
DATA complete<>+8(SB)/8, $0xffffffffffffffff
DATA complete<>+16(SB)/8, $0xffffffffffffffff
DATA complete<>+24(SB)/8, $0xbfdfefffffffffff
GLOBL complete<>(SB), RODATA|NOPTR, $32

DATA nibbles<>+0(SB)/8, $0x0f0f0f0f0f0f0f0f
GLOBL nibbles<>(SB), RODATA|NOPTR, $8
DATA threes<>+0(SB)/8, $0x6060606060606060 // 0xe0 less these is 0x80
GLOBL threes<>(SB), RODATA|NOPTR, $8
DATA fours<>+0(SB)/8, $0x7070707070707070 // likewise 0xf0
GLOBL fours<>(SB), RODATA|NOPTR, $8
DATA highs<>+0(SB)/8, $0x8080808080808080
GLOBL highs<>(SB), RODATA|NOPTR, $8

// func wideUTF8(p *byte, n int) (at int, ok bool)
TEXT ·wideUTF8(SB), NOSPLIT, $0-25
	MOVQ p+0(FP), SI
	MOVQ n+8(FP), DX
	SUBQ $32, DX // the last place where a block begins
	XORQ AX, AX
	VPXOR Y1, Y1, Y1 // the block before
	VPXOR Y2, Y2, Y2 // what is wrong so far
	VPXOR Y3, Y3, Y3 // not 0: the block before wants more
	VPBROADCASTQ nibbles<>(SB), Y4
	VMOVDQU firstHigh<>(SB), Y5
	VMOVDQU firstLow<>(SB), Y6
	VMOVDQU nextHigh<>(SB), Y7
	VPBROADCASTQ threes<>(SB), Y8
	VPBROADCASTQ fours<>(SB), Y9
	VPBROADCASTQ highs<>(SB), Y10
	VMOVDQU complete<>(SB), Y11

loop:
	CMPQ AX, DX
	JGT  done
	VMOVDQU (SI)(AX*1), Y0
	ADDQ $32, AX
	VPTEST Y10, Y0
	JNZ  mixed
	VPOR Y3, Y2, Y2
	VPXOR Y3, Y3, Y3
	VMOVDQA Y0, Y1
	JMP  loop

mixed:
	VPERM2I128 $0x21, Y0, Y1, Y12
	VPALIGNR $15, Y12, Y0, Y13 // each byte's predecessor
	VPSRLW $4, Y13, Y14
	VPAND  Y4, Y14, Y14
	VPSHUFB Y14, Y5, Y14
	VPAND  Y4, Y13, Y13
	VPSHUFB Y13, Y6, Y13
	VPAND  Y13, Y14, Y14
	VPSRLW $4, Y0, Y13
	VPAND  Y4, Y13, Y13
	VPSHUFB Y13, Y7, Y13
	VPAND  Y13, Y14, Y14 // what is wrong with each pair
	VPALIGNR $14, Y12, Y0, Y13
	VPSUBUSB Y8, Y13, Y13
	VPALIGNR $13, Y12, Y0, Y15
	VPSUBUSB Y9, Y15, Y15
	VPOR   Y13, Y15, Y15
	VPAND  Y10, Y15, Y15 // 80 where a second continuation must be
	VPXOR  Y15, Y14, Y14
	VPOR   Y14, Y2, Y2
	VPSUBUSB Y11, Y0, Y3
	VMOVDQA Y0, Y1
	JMP  loop

done:
	VPTEST Y2, Y2
	SETEQ ok+24(FP)
	VZEROUPPER
	MOVQ AX, at+16(FP)
	RET
