package harness

// Drivers are the values of relay.driver, which selects what moves the bytes of a stream: an event
// loop, or a goroutine for each stream.
var Drivers = []string{"loop", "goroutine"}
