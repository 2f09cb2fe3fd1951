package harness

var Drivers = []string{"loop", "goroutine"}
