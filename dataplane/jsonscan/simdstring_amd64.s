//go:build !purego

#include "textflag.h"

DATA quotes<>+0(SB)/8, $0x2222222222222222
GLOBL quotes<>(SB), RODATA|NOPTR, $8
DATA slashes<>+0(SB)/8, $0x5c5c5c5c5c5c5c5c
GLOBL slashes<>(SB), RODATA|NOPTR, $8
DATA controls<>+0(SB)/8, $0x1f1f1f1f1f1f1f1f
GLOBL controls<>(SB), RODATA|NOPTR, $8

// MARKS sets each byte of out that is a quote, a backslash or a control character in in.
#define MARKS(in, out, tmp) \
	VPCMPEQB in, Y4, out; \
	VPCMPEQB in, Y5, tmp; \
	VPOR     tmp, out, out; \
	VPMINUB  in, Y6, tmp; \
	VPCMPEQB in, tmp, tmp; \
	VPOR     tmp, out, out

// func wideString(p *byte, i, n int, lens *[256]uint8) (at int, high uint32)
TEXT ·wideString(SB), NOSPLIT, $0-44
	MOVQ p+0(FP), SI
	MOVQ i+8(FP), AX
	MOVQ n+16(FP), DX
	MOVQ lens+24(FP), DI
	VPBROADCASTQ quotes<>(SB), Y4
	VPBROADCASTQ slashes<>(SB), Y5
	VPBROADCASTQ controls<>(SB), Y6
	VPXOR Y7, Y7, Y7 // all bytes seen, together
	MOVQ DX, R12
	SUBQ $32, R12 // the last place where a block begins
	MOVQ R12, R13
	SUBQ $32, R13 // and where two do

two:
	CMPQ AX, R13
	JGT  one
	VMOVDQU (SI)(AX*1), Y0
	VMOVDQU 32(SI)(AX*1), Y8
	VPOR Y0, Y7, Y7
	VPOR Y8, Y7, Y7
	MARKS(Y0, Y1, Y2)
	MARKS(Y8, Y9, Y10)
	VPOR Y1, Y9, Y2
	VPTEST Y2, Y2
	JNZ  first
	ADDQ $64, AX
	JMP  two

first:
	VPMOVMSKB Y1, BX
	TESTL BX, BX
	JNZ  marked
	VPMOVMSKB Y9, BX
	ADDQ $32, AX
	JMP  marked

one:
	CMPQ AX, R12
	JGT  done
	VMOVDQU (SI)(AX*1), Y0
	VPOR Y0, Y7, Y7
	MARKS(Y0, Y1, Y2)
	VPMOVMSKB Y1, BX
	TESTL BX, BX
	JNZ  marked
	ADDQ $32, AX
	JMP  one

marked: // BX: what is marked of the block at AX, not 0
	BSFL BX, CX
	LEAQ (AX)(CX*1), R8
	CMPB (SI)(R8*1), $0x5c
	JNE  stop
	LEAQ 1(R8), R9
	CMPQ R9, DX
	JGE  stop // a backslash at the very end
	MOVBLZX (SI)(R9*1), R10
	CMPB (DI)(R10*1), $2
	JNE  stop
	ADDL $2, CX
	CMPL CX, $32
	JGE  over
	SHRL CX, BX // what lies before the end of the escape is not special
	SHLL CX, BX
	TESTL BX, BX
	JNZ  marked
	ADDQ $32, AX
	JMP  two

over: // the escape ends with the block or behind it
	ADDQ CX, AX
	JMP  two

stop:
	MOVQ R8, AX

done:
	VPMOVMSKB Y7, BX
	VZEROUPPER
	MOVQ AX, at+32(FP)
	MOVL BX, high+40(FP)
	RET
