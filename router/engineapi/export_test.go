package engineapi

// ReservedFields returns the names of the members that a caller may not set, at the top of a
// request and in its sampling_options.
func ReservedFields() (top, sampling []string) {
	for name := range reserved {
		if _, known := topSection[name]; !known {
			top = append(top, name)
		}
	}
	for _, list := range []map[string]bool{reserved, reservedSampling} {
		for name := range list {
			if _, known := samplingSection[name]; !known {
				sampling = append(sampling, name)
			}
		}
	}
	return top, sampling
}
