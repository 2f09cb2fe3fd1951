//go:build !amd64 || purego

package jsonscan

const wide = false

func wideString(*byte, int, int, *[256]uint8) (at int, high uint32) {
	panic("jsonscan: no wide registers")
}

func wideForm(*byte, *simdCarry) (wrong, commas, spaces uint64) {
	panic("jsonscan: no wide registers")
}

func wideArray(*byte, int, *uint32, int) (blocks int, ends uint64, read int) {
	panic("jsonscan: no wide registers")
}

func wideUTF8(*byte, int) (at int, ok bool) { panic("jsonscan: no wide registers") }
