package blockhash

// Made by this package once; all were checked against the XXH3 of the
// reference C library and the splitmix64 finaliser in Python.
var (
	goldenLocals = []Local{0x6fc1ebd4f4d6ea31, 0xc03f64119f038920, 0xa7bef1c3b3535717}
	goldenSeqs   = []Seq{0x64f1fb8e945ea931, 0xa19f1adaf7783e5d, 0x3ff8c65f8b2b21b7}
	goldenText   = []Seq{0x430d9dabb8650145, 0x5f8ef7a606c1707f}
	goldenLong   = []Local{0xed23844e189677f1}
	goldenTagged = Local(0xf89160597f0247b5)
)
