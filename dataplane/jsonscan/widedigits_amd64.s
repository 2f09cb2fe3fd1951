//go:build !purego

#include "textflag.h"

DATA zeros<>+0(SB)/8, $0x3030303030303030
GLOBL zeros<>(SB), RODATA|NOPTR, $8
DATA nines<>+0(SB)/8, $0x0909090909090909
GLOBL nines<>(SB), RODATA|NOPTR, $8

// func wideDigits(p *byte) (none uint64)
//
// A byte less '0' is 9 or less, taken without a sign, only where it is a digit.
TEXT ·wideDigits(SB), NOSPLIT, $0-16
	MOVQ         p+0(FP), SI
	VPBROADCASTQ zeros<>(SB), Y0
	VPBROADCASTQ nines<>(SB), Y1
	VMOVDQU      (SI), Y2
	VMOVDQU      32(SI), Y3
	VPSUBB       Y0, Y2, Y2
	VPSUBB       Y0, Y3, Y3
	VPMINUB      Y1, Y2, Y4
	VPMINUB      Y1, Y3, Y5
	VPCMPEQB     Y4, Y2, Y2
	VPCMPEQB     Y5, Y3, Y3
	VPMOVMSKB    Y2, AX
	VPMOVMSKB    Y3, CX
	SHLQ         $32, CX
	ORQ          CX, AX
	NOTQ         AX
	VZEROUPPER
	MOVQ         AX, none+8(FP)
	RET
