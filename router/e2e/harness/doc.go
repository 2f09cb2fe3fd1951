// Package harness is what the system tests in router/e2e share: it starts simulated and
// scripted engines (StartSim, StartScripted), a whole router in this process over them
// (StartRouter, Router), or a sluice process (Launch), sends requests (Post, Get) and
// checks the answers, the metrics and that nothing remains reserved (WantIdle).
//
// Only tests import it: the packages below router/e2e, one a topic, and the tests of
// cmd/sluice. Unlike other packages of router/ it may import bench/, as tests may. It
// never holds assertions about one topic alone; those belong to the topic's package.
package harness
