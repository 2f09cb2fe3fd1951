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

// func wideForm(p *byte, before *idsBefore) (wrong, commas, spaces uint64)
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

DATA tens<>+0(SB)/8, $0x010a010a010a010a // of two digits
GLOBL tens<>(SB), RODATA|NOPTR, $8
DATA hundreds<>+0(SB)/8, $0x0001006400010064 // of two pairs
GLOBL hundreds<>(SB), RODATA|NOPTR, $8
DATA myriads<>+0(SB)/8, $0x0001271000012710 // of two fours
GLOBL myriads<>(SB), RODATA|NOPTR, $8

// DIGITS takes the digits of the next number to BX, zeros before them.
#define DIGITS \
	TZCNTQ R8, AX; \
	BLSRQ  R8, R8; \
	MOVQ   (SI)(AX*1), BX; \
	SUBQ   AX, R9; \
	SHLQ   $3, R9; \
	SHRXQ  R9, BX, BX; \
	SHLXQ  R9, BX, BX; \
	LEAQ   1(AX), R9; \
	SHRXQ  R9, R10, R11; \
	ANDQ   $1, R11; \
	ADDQ   R11, R9

// func wideNumbers(p *byte, begin int, ends, spaces uint64, out *uint32, n int)
TEXT ·wideNumbers(SB), NOSPLIT, $0-48
	MOVQ         p+0(FP), SI
	MOVQ         begin+8(FP), R9
	MOVQ         ends+16(FP), R8
	MOVQ         spaces+24(FP), R10
	MOVQ         out+32(FP), DI
	MOVQ         n+40(FP), CX
	VPBROADCASTQ zeros<>(SB), Y1
	VPBROADCASTQ tens<>(SB), Y2
	VPBROADCASTQ hundreds<>(SB), Y3
	VPBROADCASTQ myriads<>(SB), Y4

four:
	DIGITS
	VMOVQ       BX, X0
	DIGITS
	VPINSRQ     $1, BX, X0, X0
	DIGITS
	VMOVQ       BX, X5
	DIGITS
	VPINSRQ     $1, BX, X5, X5
	VINSERTI128 $1, X5, Y0, Y0
	VPSUBUSB   Y1, Y0, Y0
	VPMADDUBSW Y2, Y0, Y0
	VPMADDWD   Y3, Y0, Y0
	VPACKUSDW  Y0, Y0, Y0
	VPMADDWD   Y4, Y0, Y0
	VPERMQ     $8, Y0, Y0
	VMOVDQU    X0, (DI)
	ADDQ       $16, DI
	SUBQ       $4, CX
	JG         four
	VZEROUPPER
	RET
