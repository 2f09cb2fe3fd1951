//go:build !purego

#include "textflag.h"

DATA zeros<>+0(SB)/8, $0x3030303030303030
GLOBL zeros<>(SB), RODATA|NOPTR, $8
DATA nines<>+0(SB)/8, $0x0909090909090909
GLOBL nines<>(SB), RODATA|NOPTR, $8
DATA commas<>+0(SB)/8, $0x2c2c2c2c2c2c2c2c
GLOBL commas<>(SB), RODATA|NOPTR, $8
DATA spaces<>+0(SB)/8, $0x2020202020202020
GLOBL spaces<>(SB), RODATA|NOPTR, $8

// EQUAL sets out to one bit for each byte of Y2 and Y3 that is one of in.
#define EQUAL(in, out) \
	VPCMPEQB  in, Y2, Y4; \
	VPCMPEQB  in, Y3, Y5; \
	VPMOVMSKB Y4, out; \
	VPMOVMSKB Y5, DX; \
	SHLQ      $32, DX; \
	ORQ       DX, out

// func wideForm(p *byte, before *simdCarry) (wrong, commas, spaces uint64)
//
// A byte less '0' is 9 or less, taken without a sign, only where it is a digit.
TEXT ·wideForm(SB), NOSPLIT, $0-40
	MOVQ         p+0(FP), SI
	VPBROADCASTQ zeros<>(SB), Y0
	VPBROADCASTQ nines<>(SB), Y1
	VPBROADCASTQ commas<>(SB), Y6
	VPBROADCASTQ spaces<>(SB), Y7
	VMOVDQU      (SI), Y2
	VMOVDQU      32(SI), Y3
	EQUAL(Y0, AX)
	EQUAL(Y6, BX)
	EQUAL(Y7, CX)
	VPSUBB       Y0, Y2, Y2
	VPSUBB       Y0, Y3, Y3
	VPMINUB      Y1, Y2, Y4
	VPMINUB      Y1, Y3, Y5
	VPCMPEQB     Y4, Y2, Y2
	VPCMPEQB     Y5, Y3, Y3
	VPMOVMSKB    Y2, DI
	VPMOVMSKB    Y3, DX
	SHLQ         $32, DX
	ORQ          DX, DI
	VZEROUPPER
	MOVQ         before+8(FP), SI

	// R8: behind a digit
	MOVQ  0(SI), R8
	SHRQ  $63, R8
	LEAQ  (R8)(DI*2), R8

	// R9: a 0 that a number begins with
	ANDNQ DI, R8, R9
	ANDQ  AX, R9

	// R10, R11, R12: the second, fourth, eighth digit of a row and those behind it
	MOVQ  DI, R10
	ANDQ  R8, R10
	MOVQ  8(SI), R11
	SHRQ  $62, R11
	LEAQ  (R11)(R10*4), R11
	ANDQ  R10, R11
	MOVQ  16(SI), R12
	SHRQ  $60, R12
	MOVQ  R11, R13
	SHLQ  $4, R13
	ORQ   R13, R12
	ANDQ  R11, R12

	// what is none of the three
	MOVQ  DI, R13
	ORQ   BX, R13
	ORQ   CX, R13
	NOTQ  R13
	ORQ   R13, R12

	// a comma not behind a digit, a space not behind a comma, a digit behind that 0
	ANDNQ BX, R8, R13
	ORQ   R13, R12
	MOVQ  24(SI), R13
	SHRQ  $63, R13
	LEAQ  (R13)(BX*2), R13
	ANDNQ CX, R13, R13
	ORQ   R13, R12
	MOVQ  32(SI), R13
	SHRQ  $63, R13
	LEAQ  (R13)(R9*2), R13
	ANDQ  DI, R13
	ORQ   R13, R12
	MOVQ  DI, 0(SI)
	MOVQ  R10, 8(SI)
	MOVQ  R11, 16(SI)
	MOVQ  BX, 24(SI)
	MOVQ  R9, 32(SI)
	MOVQ  R12, wrong+16(FP)
	MOVQ  BX, commas+24(FP)
	MOVQ  CX, spaces+32(FP)
	RET

DATA tenths<>+0(SB)/8, $0x0a0a0a0a0a0a0a0a // the first byte that is above all digits
GLOBL tenths<>(SB), RODATA|NOPTR, $8
DATA backwards<>+0(SB)/8, $0x0001020304050607
DATA backwards<>+8(SB)/8, $0x08090a0b0c0d0e0f
GLOBL backwards<>(SB), RODATA|NOPTR, $16
DATA tens<>+0(SB)/8, $0x0a010a010a010a01 // of two digits, the last one first
GLOBL tens<>(SB), RODATA|NOPTR, $8
DATA hundreds<>+0(SB)/8, $0x0064000100640001 // of two pairs
GLOBL hundreds<>(SB), RODATA|NOPTR, $8
DATA myriads<>+0(SB)/8, $0x2710000127100001 // of two fours
GLOBL myriads<>(SB), RODATA|NOPTR, $8

// TWO loads the eight bytes before each of the next two ends.
#define TWO(X) \
	TZCNTQ  BX, AX; \
	BLSRQ   BX, BX; \
	VMOVQ   -8(SI)(AX*1), X; \
	TZCNTQ  BX, DX; \
	BLSRQ   BX, BX; \
	VMOVHPS -8(SI)(DX*1), X, X

// FOURS makes of each eight bytes in Y, the last digit of a number in the highest, two numbers
// of four digits each. Turned round, the first byte that is not a digit is the lowest such one,
// and what is less than its bit is kept.
#define FOURS(Y) \
	VPSHUFB    Y10, Y, Y; \
	VPSUBB     Y0, Y, Y; \
	VPMAXUB    Y9, Y, Y4; \
	VPCMPEQB   Y, Y4, Y4; \
	VPADDQ     Y11, Y4, Y5; \
	VPANDN     Y5, Y4, Y4; \
	VPAND      Y4, Y, Y; \
	VPMADDUBSW Y12, Y, Y; \
	VPMADDWD   Y13, Y, Y

// FOUR writes the next four numbers.
#define FOUR(to) \
	TWO(X2); \
	TWO(X3); \
	VINSERTI128 $1, X3, Y2, Y2; \
	FOURS(Y2); \
	VPACKUSDW   Y2, Y2, Y2; \
	VPMADDWD    Y14, Y2, Y2; \
	VPERMQ      $8, Y2, Y2; \
	VMOVDQU     X2, to

// func wideArray(p *byte, n int, out *uint32, room int) (blocks int, ends uint64, read int)
//
// BX, AX, R14 are where commas, zeros and spaces stand, DX digits. R9 to R13 carry what a block
// leaves to the next: a digit, the second ones of a row, the fourth ones, a comma, a 0 that a
// number begins with.
TEXT ·wideArray(SB), NOSPLIT, $16-56
	MOVQ           p+0(FP), SI
	MOVQ           n+8(FP), AX
	SHLQ           $6, AX
	ADDQ           SI, AX
	MOVQ           AX, end-8(SP)
	MOVQ           out+16(FP), DI
	MOVQ           free+24(FP), AX
	LEAQ           -128(DI)(AX*4), AX // where there is room for a block's
	MOVQ           AX, full-16(SP)
	VPBROADCASTQ   zeros<>(SB), Y0
	VPBROADCASTQ   nines<>(SB), Y1
	VPBROADCASTQ   commas<>(SB), Y6
	VPBROADCASTQ   spaces<>(SB), Y7
	VPBROADCASTQ   tenths<>(SB), Y9
	VBROADCASTI128 backwards<>(SB), Y10
	VPCMPEQB       Y11, Y11, Y11
	VPBROADCASTQ   tens<>(SB), Y12
	VPBROADCASTQ   hundreds<>(SB), Y13
	VPBROADCASTQ   myriads<>(SB), Y14
	MOVQ           $0, ends+40(FP)
	XORL           R9, R9
	XORL           R10, R10
	XORL           R11, R11
	XORL           R12, R12
	XORL           R13, R13

block:
	CMPQ      SI, end-8(SP)
	JAE       done
	CMPQ      DI, full-16(SP)
	JA        done
	VMOVDQU   (SI), Y2
	VMOVDQU   32(SI), Y3
	EQUAL(Y0, AX)
	EQUAL(Y6, BX)
	EQUAL(Y7, R14)
	VPSUBB    Y0, Y2, Y2
	VPSUBB    Y0, Y3, Y3
	VPMINUB   Y1, Y2, Y4
	VPMINUB   Y1, Y3, Y5
	VPCMPEQB  Y4, Y2, Y2
	VPCMPEQB  Y5, Y3, Y3
	VPMOVMSKB Y2, DX
	VPMOVMSKB Y3, R8
	SHLQ      $32, R8
	ORQ       R8, DX

	// R8: behind a digit; CX: what is wrong
	LEAQ  (R9)(DX*2), R8
	MOVQ  DX, R9
	SHRQ  $63, R9
	MOVQ  DX, CX
	ORQ   BX, CX
	ORQ   R14, CX
	NOTQ  CX
	ANDNQ BX, R8, R15
	ORQ   R15, CX
	LEAQ  (R12)(BX*2), R15
	ANDNQ R14, R15, R15
	ORQ   R15, CX
	MOVQ  BX, R12
	SHRQ  $63, R12
	ANDNQ AX, R8, AX
	LEAQ  (R13)(AX*2), R15
	ANDQ  DX, R15
	ORQ   R15, CX
	MOVQ  AX, R13
	SHRQ  $63, R13

	// R8, R14: the second, fourth digit of a row and those behind it
	ANDQ DX, R8
	LEAQ (R10)(R8*4), R14
	ANDQ R8, R14
	MOVQ R8, R10
	SHRQ $62, R10
	MOVQ R14, R15
	SHLQ $4, R15
	ORQ  R11, R15
	ANDQ R14, R15
	ORQ  R15, CX
	MOVQ R14, R11
	SHRQ $60, R11
	TESTQ CX, CX
	JNE  wrong

	// Eight numbers, and four more: nearly always so many end in a block, and none too many
	// costs as much when read without need as a wrong guess.
	POPCNTQ BX, CX
	TWO(X2)
	TWO(X3)
	TWO(X4)
	VINSERTI128 $1, X4, Y2, Y2
	TWO(X5)
	VINSERTI128 $1, X5, Y3, Y3
	FOURS(Y2)
	FOURS(Y3)
	VPACKUSDW   Y3, Y2, Y2
	VPMADDWD    Y14, Y2, Y2
	VMOVDQU     Y2, (DI)
	FOUR(32(DI))
	LEAQ (DI)(CX*4), R8
	SUBQ $12, CX
	JG   more

next:
	MOVQ R8, DI
	ADDQ $64, SI
	JMP  block

more:
	ADDQ $48, DI
four:
	FOUR((DI))
	ADDQ $16, DI
	SUBQ $4, CX
	JG   four
	JMP  next

wrong: // up to there
	LEAQ    -1(CX), AX
	ANDNQ   AX, CX, AX
	ANDQ    AX, BX
	MOVQ    BX, ends+40(FP)
	MOVQ    SI, end-8(SP)
	POPCNTQ BX, CX
	LEAQ    (DI)(CX*4), R8
	TESTQ   CX, CX
	JE      done
last:
	FOUR((DI))
	ADDQ $16, DI
	SUBQ $4, CX
	JG   last
	MOVQ R8, DI

done:
	VZEROUPPER
	SUBQ p+0(FP), SI
	SHRQ $6, SI
	MOVQ SI, blocks+32(FP)
	SUBQ out+16(FP), DI
	SHRQ $2, DI
	MOVQ DI, read+48(FP)
	RET
