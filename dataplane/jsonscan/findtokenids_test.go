package jsonscan

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// findIDsReference is FindTokenIDs by two passes.
func findIDsReference(dst []uint32, body []byte, name string) (ids []uint32, ok bool, err error) {
	v, ok, err := Find(body, name)
	if err != nil || !ok {
		return dst, false, err
	}
	ids, wrong := TokenIDs(dst, body[v.Start:v.End])
	return ids, wrong == nil, nil
}

func TestFindTokenIDs(t *testing.T) {
	long := AppendTokenIDs(nil, manyIDs(5000))
	for _, body := range []string{
		``, `[]`, `{}`, `{"tokens":[]}`, `{"tokens":[1,2,3]}`, `{"count":3,"tokens":[1,2,3],"token_strs":null}`,
		`{"tokens":[1,2],"tokens":[3]}`, `{"tokens":[1,2],"tokens":"none"}`, `{"tokens":"none","tokens":[4]}`, `{"tokens":[1,2],"tokens":[]}`,
		`{"tokens":[1,-2]}`, `{"tokens":[1,2.5]}`, `{"tokens":[[1],2]}`, `{"tokens":[1,2}`, `{"tokens":[1,2]`, `{"tokens":[1,2]}x`, `{"tokens":[1,2],}`,
		`{"tokens":[4294967296]}`, `{"tokens":null}`, `{"a":{"tokens":[1]}}`, `{"\u0074okens":[7]}`, `{"tokens" : [ 1 , 2 ] }`, `{"tokens":[01]}`,
		`{"tokens":` + string(long) + `}`, `{"tokens":` + string(long) + `,"tokens":[1]}`, `{"tokens":` + string(long[:len(long)-1]) + `,"x"]}`,
	} {
		for _, dst := range [][]uint32{nil, {9, 8}} {
			got, ok, err := FindTokenIDs(slices.Clone(dst), []byte(body), "tokens")
			want, wantOK, wantErr := findIDsReference(slices.Clone(dst), []byte(body), "tokens")
			if !slices.Equal(got, want) || ok != wantOK || (err == nil) != (wantErr == nil) {
				t.Errorf("%.80q: %d ids, %t, %v; want %d, %t, %v", body, len(got), ok, err, len(want), wantOK, wantErr)
			}
		}
	}
}

func manyIDs(n int) []uint32 {
	ids := make([]uint32, n)
	for i := range ids {
		ids[i] = rand.Uint32() >> rand.IntN(32)
	}
	return ids
}

// Ids are read into room that is made once, and is not larger than what they need.
func TestTokenIDsAllocateOnce(t *testing.T) {
	for _, n := range []int{1000, 250_000} {
		ids := manyIDs(n)
		raw := AppendTokenIDs(nil, ids)
		body := fmt.Appendf(nil, `{"count":%d,"tokens":%s}`, n, raw)
		for what, read := range map[string]func() []uint32{
			"TokenIDs":     func() []uint32 { got, _ := TokenIDs(nil, raw); return got },
			"FindTokenIDs": func() []uint32 { got, _, _ := FindTokenIDs(nil, body, "tokens"); return got },
		} {
			if got := read(); !slices.Equal(got, ids) || cap(got) > n+2*maxIDsPerBlock {
				t.Errorf("%s of %d ids: %d ids, room for %d", what, n, len(got), cap(got))
			}
			if allocs := testing.AllocsPerRun(5, func() { read() }); allocs > 1 {
				t.Errorf("%s of %d ids: %v allocations", what, n, allocs)
			}
		}
	}
}
